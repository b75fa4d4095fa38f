"""
Scripts in processes of their own, forked from one that has imported what training needs: importing takes longer than the
trainings of tests.
"""

import faulthandler
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing.connection import wait
from pathlib import Path

from torch.distributed import TCPStore


SECONDS = 300  # after which processes are taken to wait for each other

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["hf_eagle3.training.trainer", "hf_eagle3.evaluation", "torch.distributed.fsdp"])


def run_forked(*command) -> subprocess.CompletedProcess:
    """What `subprocess.run` returns of a script and its arguments."""
    return run_all(command, [{}])


def run_in_two(*command, config=None) -> subprocess.CompletedProcess:
    """
    A script and its arguments as by `torchrun --nproc_per_node 2`, or as by `accelerate launch` with the configuration
    file `config`.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the launcher's, which outlives both
    shared = {} if config is None else accelerate_environment(config)
    shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)}
    return run_all(command, [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")])


def run_all(command, environments: list[dict[str, str]]) -> subprocess.CompletedProcess:
    """A process for each environment; when one fails, or none ends, the others are ended."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(number)) for number in range(len(environments))]
        started = [
            processes.Process(target=run_here, args=(command, environment, f"{output}.out", f"{output}.err"))
            for environment, output in zip(environments, outputs)
        ]
        for process in started:
            process.start()
        while running := [process.sentinel for process in started if process.exitcode is None]:
            if not wait(running, SECONDS) or any(process.exitcode for process in started):
                for process in started:
                    process.terminate()
        stdout, stderr = ("".join(path.with_suffix(kind).read_text() for path in outputs) for kind in (".out", ".err"))
    code = max(abs(process.exitcode) for process in started)
    return subprocess.CompletedProcess(command, code, stdout, stderr)


def run_here(command, environment: dict[str, str], stdout: str, stderr: str) -> None:
    for descriptor, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    faulthandler.enable()  # or nothing would say where a process crashed
    os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment)
    sys.argv = list(map(str, command))
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


def accelerate_environment(config) -> dict[str, str]:
    """What `accelerate launch` sets for its processes."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(config), "-"]))
    environment = prepare_multi_gpu_env(arguments)
    return {name: value for name, value in environment.items() if os.environ.get(name) != value}
