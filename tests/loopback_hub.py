"""A Hub small enough for tests: the endpoints that huggingface_hub's client calls to create, push to and read repositories."""

import base64
import hashlib
import inspect
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

import yaml
from huggingface_hub import RepoCard


# Older clients (1.33) ask huggingface.co whether a card is valid, whatever Hub they talk to.
VALIDATES_CARDS_HERE = "https://" not in inspect.getsource(RepoCard.validate).split('"""')[-1]


USER = "me"


class Hub:
    """
    Repositories by id: `repos["me/draft"]["main"]` is a list of commits, each a dictionary from file names to
    contents; a Space is `repos["spaces/me/page"]`, a data set `repos["datasets/me/rows"]`. `cut` has the kinds of requests that are answered by closing the connection, each once.
    """

    def __init__(self):
        self.repos, self.private, self.blobs = {}, set(), {}
        self.requests, self.cut, self.lock = [], [], threading.Lock()

    def commits(self, repo, revision):
        branches = self.repos[repo]
        if revision in branches:
            return branches[revision]
        for commits in branches.values():
            for number, files in enumerate(commits):
                if sha_of(files) == revision:
                    return commits[: number + 1]
        raise LookupError(revision)

    def environment(self, tmp_path):
        """What a process needs to talk to this Hub, with a cache of its own."""
        alone = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_test", **alone}


def sha_of(files) -> str:
    content = json.dumps({name: hashlib.sha1(content).hexdigest() for name, content in sorted(files.items())})
    return hashlib.sha1(content.encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize, disable_nagle_algorithm = -1, True  # or the client waits 40 ms for the second part of each answer
    hub: Hub

    def log_message(self, *args):
        pass

    def answer(self, content=None, status=200, headers=()):
        body = content if isinstance(content, bytes) else json.dumps({} if content is None else content).encode()
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(self, status, code, message=""):
        self.answer({"error": message or code}, status, {"X-Error-Code": code, "X-Error-Message": message or code})

    def handle_any(self):
        length = int(self.headers.get("Content-Length") or 0)
        path = unquote(urlparse(self.path).path)
        with self.hub.lock:
            self.hub.requests.append((self.command, path))
            command = "GET" if self.command == "HEAD" else self.command
            for method, pattern, respond in ROUTES:
                if method == command and (match := re.fullmatch(pattern, path)):
                    if respond.__name__ in self.hub.cut:
                        self.hub.cut.remove(respond.__name__)
                        self.rfile.read(length // 2)
                        self.close_connection = True
                        return self.connection.close()
                    return respond(self, self.rfile.read(length) if length else b"", **match.groupdict())
        self.error(404, "EntryNotFound", f"no route for {self.command} {path}")

    do_GET = do_POST = do_PUT = do_HEAD = handle_any


def whoami(self, body):
    self.answer({"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": {"role": "write"}}})


def create_repo(self, body):
    request = json.loads(body)
    repo = f"{request.get('organization') or USER}/{request['name']}"
    if not repo.startswith(f"{USER}/"):
        return self.error(403, "Forbidden", f"You may not create {repo}.")
    if request.get("type") == "space":
        if "sdk" not in request:
            return self.error(400, "BadRequest", "A Space needs an SDK.")
        repo = f"spaces/{repo}"
    if request.get("type") == "dataset":
        repo = f"datasets/{repo}"
    if repo in self.hub.repos:
        return self.answer({"url": f"{self.hub.url}/{repo}", "error": "exists"}, 409)
    self.hub.repos[repo] = {"main": [{}]}
    if request.get("private") or request.get("visibility") == "private":
        self.hub.private.add(repo)
    self.answer({"url": f"{self.hub.url}/{repo}", "name": repo, "id": repo})


def create_branch(self, body, repo, revision):
    if revision.startswith("refs/"):
        return self.error(400, "BadRequest", f"{revision} is no name of a branch")
    if revision in self.hub.repos[repo]:
        return self.error(409, "Conflict", "Reference already exists")
    self.hub.repos[repo][revision] = list(self.hub.repos[repo]["main"])
    self.answer()


def validate_yaml(self, body):
    """
    As the Hub does, as far as its documentation tells: metadata is YAML, license and pipeline are words, the license is an id
    (all are in lower case), results are whole.
    """
    metadata = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
    words = dict.fromkeys(("license", "pipeline_tag", "library_name"), str)
    words |= dict.fromkeys(("tags", "datasets", "model-index"), list)
    errors = [name for name, kind in words.items() if name in metadata and not isinstance(metadata[name], kind)]
    for entry in metadata.get("model-index", []):
        for result in entry["results"]:
            whole = result["task"]["type"] and result["dataset"]["type"] and result["dataset"]["name"]
            if not whole or not all({"type", "value"} <= metric.keys() for metric in result["metrics"]):
                errors.append("model-index")
    license = metadata.get("license")
    if license is not None and not re.fullmatch(r"[a-z][a-z0-9.+-]*", str(license)):
        errors.append(f"license {license!r}")
    if metadata.get("base_model_relation") not in (None, "adapter", "merge", "quantized", "finetune"):
        errors.append("base_model_relation")
    self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)


def preupload(self, body, repo, revision):
    if not repo.removeprefix("spaces/").removeprefix("datasets/").startswith(f"{USER}/"):
        return self.error(403, "Forbidden", f"You may not write to {repo}.")
    paths = [file["path"] for file in json.loads(body)["files"]]
    modes = ("lfs" if path.endswith(".safetensors") else "regular" for path in paths)
    files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in zip(paths, modes)]
    self.answer({"files": files})


def lfs_batch(self, body, repo):
    objects = []
    for each in json.loads(body)["objects"]:
        if each["oid"] not in self.hub.blobs:
            each["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}", "header": {}}}
        objects.append(each)
    self.answer({"transfer": "basic", "objects": objects})


def lfs_put(self, body, oid):
    if hashlib.sha256(body).hexdigest() != oid:
        return self.error(400, "BadRequest", "sha256 differs")
    self.hub.blobs[oid] = body
    self.answer()


def commit(self, body, repo, revision):
    files = dict(self.hub.commits(repo, revision)[-1])
    for line in body.splitlines():
        entry = json.loads(line)
        key, value = entry["key"], entry["value"]
        if key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            files[value["path"]] = self.hub.blobs[value["oid"]]
        elif key == "deletedFile":
            files.pop(value["path"], None)
    self.hub.repos[repo][revision].append(files)
    url = f"{self.hub.url}/{repo}/commit/{sha_of(files)}"
    self.answer({"commitUrl": url, "commitOid": sha_of(files), "hookOutput": ""})


def files_or_error(self, repo, revision):
    try:
        return self.hub.commits(repo, revision)[-1]
    except KeyError:
        self.error(404, "RepoNotFound", f"{repo} not found")
    except LookupError:
        self.error(404, "RevisionNotFound", f"{revision} not found")


def model_info(self, body, repo, revision="main"):
    if (files := files_or_error(self, repo, revision)) is None:
        return
    siblings = [{"rfilename": name} for name in files]
    names = {"id": repo, "modelId": repo, "sha": sha_of(files)}
    self.answer({**names, "siblings": siblings, "private": False, "tags": []})


def tree(self, body, repo, revision):
    if (files := files_or_error(self, repo, revision)) is None:
        return
    oids = {name: hashlib.sha1(content).hexdigest() for name, content in files.items()}
    self.answer([{"type": "file", "path": name, "size": len(files[name]), "oid": oid} for name, oid in oids.items()])


def resolve(self, body, repo, revision, name):
    if repo in self.hub.private and "Authorization" not in self.headers:
        return self.error(404, "RepoNotFound", f"{repo} not found")
    if (files := files_or_error(self, repo, revision)) is None:
        return
    if name not in files:
        return self.error(404, "EntryNotFound", f"{name} not found")
    headers = {"X-Repo-Commit": sha_of(files), "ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"'}
    self.answer(files[name], headers=headers)


REPO, REVISION = r"(?P<repo>[^/]+/[^/]+)", r"(?P<revision>refs/pr/\d+|[^/]+)"
OTHER = r"(?P<repo>(?:spaces|datasets)/[^/]+/[^/]+)"
ROUTES = (
    ("GET", "/api/whoami-v2", whoami),
    ("POST", "/api/repos/create", create_repo),
    ("POST", "/api/validate-yaml", validate_yaml),
    ("POST", f"/api/models/{REPO}/branch/{REVISION}", create_branch),
    ("POST", f"/api/models/{REPO}/preupload/{REVISION}", preupload),
    ("POST", f"/api/models/{REPO}/commit/{REVISION}", commit),
    ("POST", f"/api/{OTHER}/preupload/{REVISION}", preupload),
    ("POST", f"/api/{OTHER}/commit/{REVISION}", commit),
    ("GET", f"/api/{OTHER}/tree/{REVISION}", tree),
    ("GET", f"/api/models/{REPO}/revision/{REVISION}", model_info),
    ("GET", f"/api/models/{REPO}/tree/{REVISION}", tree),
    ("GET", f"/api/models/{REPO}", model_info),
    ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", lfs_batch),
    ("PUT", "/lfs/(?P<oid>[0-9a-f]+)", lfs_put),
    ("GET", f"/{REPO}/resolve/{REVISION}/(?P<name>.+)", resolve),
    ("GET", f"/{OTHER}/resolve/{REVISION}/(?P<name>.+)", resolve),
)


@contextmanager
def serve_hub():
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
