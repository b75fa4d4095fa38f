# /// script
# dependencies = ["hf-eagle3", "gguf"]
# ///
"""
Converts a GGUF file to a folder in transformers' format: weights in bfloat16, configuration and tokenizer.

    python recipes/from_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf outputs/smollm2

The weights are dequantized. They differ from the original's as much as the file's do.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from hf_eagle3.checkpoints.files import check_new_folder
from hf_eagle3.scripts import ScriptParser, run_script


def main():
    parser = ScriptParser(description=__doc__)
    parser.add_argument("file", type=Path, help="The GGUF file")
    parser.add_argument("output_dir", help="A new folder")
    args = parser.parse_args()
    try:
        import gguf  # noqa: F401  transformers needs it, and reports too late that it is missing
    except ImportError:
        parser.error("this needs gguf: pip install gguf")
    if not args.file.is_file():
        parser.error(f"there is no file {args.file}")
    check_new_folder(args.output_dir)
    source = {"pretrained_model_name_or_path": args.file.parent, "gguf_file": args.file.name}
    quantization_config = GgufConfig(dequantize=True)  # packed weights cannot be saved
    target = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=quantization_config
    )
    target.save_pretrained(args.output_dir)
    AutoTokenizer.from_pretrained(**source).save_pretrained(args.output_dir)
    print(f"Wrote {args.output_dir}.")


if __name__ == "__main__":
    run_script(main)
