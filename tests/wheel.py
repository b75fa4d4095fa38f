"""What an installed wheel must do: train a draft, write the same text with it, save it. `make test-wheel` runs this."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import hf_eagle3


ROOT = Path(__file__).resolve().parents[1]
package = Path(hf_eagle3.__file__).parent
assert ROOT / "src" not in package.parents, f"{package} is not installed: leave PYTHONPATH unset."
assert version("hf-eagle3") == hf_eagle3.__version__

# All files are in the wheel.
sources = {path.relative_to(ROOT / "src/hf_eagle3") for path in (ROOT / "src/hf_eagle3").rglob("*")}
missing = {path for path in sources if "__pycache__" not in path.parts and not (package / path).exists()}
assert not missing, f"The wheel has no {sorted(map(str, missing))}."

command = [sys.executable, ROOT / "recipes/quickstart.py", "--output_dir", "quickstart"]
command += [
    "--target_minutes",
    "0.2",
    "--draft_minutes",
    "0.2",
    "--min_steps",
    "20",
    "--max_new_tokens",
    "16",
    "--no-bf16",
]
subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
from hf_eagle3.evaluation import BenchmarkResults  # noqa: E402


rows = [row for row in BenchmarkResults.read("quickstart/results.jsonl").rows if row.method == "eagle3"]
assert rows and all(row.num_identical == row.num_prompts for row in rows), rows
assert Path("quickstart/draft/auto_eagle3.py").exists()
print(f"hf-eagle3 {hf_eagle3.__version__} in {package} works.")
