"""Says what lies where no model is found, and what to do: a command that works, and never leads back to the error."""
import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from shlex import quote

from sampling.checkpoints.finding import WEIGHTS, checkpoint_path, flag_for, folder_of, newest_first

CONVERT = ("with transformers 4 and {}: python -c 'import sys, transformers as t; t.GPT2LMHeadModel.from_pretrained("
           "sys.argv[1], {}=True).save_pretrained(sys.argv[1])' {{folder}}; then pass --init_from={{folder}}")
OTHERS = { # files that are no model for us: what each is, and what makes a model of it
    "adapter_model.*": "an adapter, which is no model alone; with peft: python -c 'import peft, sys; peft.AutoPeftModel"
                       "ForCausalLM.from_pretrained(sys.argv[1]).merge_and_unload().save_pretrained(sys.argv[2])' "
                       "{folder} converted; then pass --init_from=converted",
    "tf_model.h5": "TensorFlow's; " + CONVERT.format("TensorFlow", "from_tf"),
    "flax_model.msgpack": "Flax's; " + CONVERT.format("Flax", "from_flax"),
    "*.index": "TensorFlow's, as gpt-2-simple saves it; with transformers 4 and TensorFlow: python -m transformers."
               "models.gpt2.convert_gpt2_original_tf_checkpoint_to_pytorch --gpt2_checkpoint_path={folder} --gpt2_"
               "config_file={folder}/hparams.json --pytorch_dump_folder_path={folder}; then pass --init_from={folder}",
    "*.gguf": "llama.cpp's: pass --init_from with the model that it was made from",
    "*.onnx": "ONNX's: pass --init_from with the model that it was exported from",
    "zero_to_fp32.py": "DeepSpeed's, which saved a model in parts; join them: python -m deepspeed.utils.zero_to_fp32 "
                       "{folder} {folder}; then pass --init_from={folder}",
    "model.*.safetensors": "a variant of the weights: cp {file} {folder}/model.safetensors; pass --init_from={folder}",
}


def advice(path: Path) -> str:
    """What is at path or near it, and the command that loads it or makes a model of it."""
    wanted, place = checkpoint_path(path), folder_of(path)
    for part in wanted, *wanted.parents:
        if os.path.islink(part) and not os.path.exists(part):
            return f"{part} is a link to {os.readlink(part)}, which is not there: repair or replace the link"
        if os.path.isdir(part) and not os.access(part, os.X_OK):
            return f"you have no permission to look into {part}: ask its owner for a copy"
    flag = flag_for(place)
    if "--init_from" in flag or (flag and place == path):
        return f"{place} holds {'a Hugging Face model' if '--init_from' in flag else 'ckpt.pt'}; pass {flag}"
    inside = [folder for pattern in ("*", "*/*", "*/snapshots/*") for folder in place.glob(pattern)]
    beside = found(place, filter(os.path.isdir, [place.parent, *place.parent.glob("*"), *Path().glob("*")]))
    return (found(path, (file for file in place.glob("*") if os.path.isfile(file) and not describe_other(file)))
            or describe_other(path) or describe_other(wanted) or found(place, filter(os.path.isdir, inside))
            or next(filter(None, map(describe_other, inside)), None)
            or f"{beside or 'pass --out_dir=FOLDER_OR_FILE'}, or --init_from=gpt2 for GPT-2")


def found(path: Path, places: Iterable[Path]) -> str:
    """Which places hold a model: first those called like a path that is no folder, then the newest. '' if none."""
    names = list(map(str, newest_first(places)))
    like = [] if os.path.isdir(path) else difflib.get_close_matches(str(path), names, len(names) or 1)
    if not (names := list(dict.fromkeys([*like, *names]))):
        return ""
    first, flag = Path(names[0]), flag_for(Path(names[0]))
    if WEIGHTS.fullmatch(first.name):
        return (f"{first} lacks its config.json: copy that beside it, and pass --init_from={quote(str(first.parent))}; "
                f"for weights that nanoGPT trained, pass {flag}")
    names = [name for name in names if flag_for(Path(name))[:6] == flag[:6]]
    what = "" if first.is_file() else "ckpt.pt in " if "--out_dir" in flag else "models in "
    return f"found {what}{', '.join(names[:5])}{', ...' * (len(names) > 5)}; pass {flag}"


def describe_other(path: Path) -> str:
    """What the file at path, or one in this folder, is, and what makes a model of it; '' if OTHERS does not have it."""
    for pattern, what in OTHERS.items():
        for file in filter(os.path.isfile, [path, *sorted(path.glob(pattern))]):
            if file.match(pattern):
                return f"{file} is {what.format(file=quote(str(file)), folder=quote(str(file.parent)))}"
    return ""
