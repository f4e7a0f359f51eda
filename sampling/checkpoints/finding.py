"""Where the checkpoint that the user means lies, and its model.py; and what to do where no
model is found: a setting that works, and never leads back to the error.
"""
import ast
import difflib
import logging
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from shlex import quote

from sampling.checkpoints.untrusted_files import (
    UNREADABLE,
    parse_python,
    read_json,
)

logger = logging.getLogger(__name__)
WEIGHTS = "model.safetensors", "pytorch_model.bin" # each of which may be shards with an index
# The files of a Hugging Face model's weights, and the index that names its shards.
WEIGHT_FILE = re.compile(r"(model(-\d+-of-\d+)?\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin)"
                     r"(\.index\.json)?")
# What else a model is saved as. The other names are of data, of adapters, or of what a Trainer
# saves beside a model.
SAVED = re.compile(r"(?!adapter|optimizer|sched|scaler|rng_state|training_args"
                   r"|(train|val|model\.\w+)\.).*\.(pt|pth|ckpt|bin|safetensors)")
# Files that are no model for us, and what each is.
OTHERS = {
    "adapter_model.*": "an adapter, which is no model alone",
    "tf_model.h5": "TensorFlow's",
    "flax_model.msgpack": "Flax's",
    "*.index": "TensorFlow's, as gpt-2-simple saves it",
    "*.gguf": "llama.cpp's",
    "*.onnx": "ONNX's",
    "data.pkl": "a part of an unpacked ckpt.pt",
    "*.distcp": "torch.distributed.checkpoint's, which saved a model in parts",
    "zero_to_fp32.py": "DeepSpeed's, which saved a model in parts",
    "model.*.safetensors": "a variant of the weights",
}
# Other names that a config.json may use, as in transformers.
HUGGINGFACE_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
# The module from which a script imports a GPT, or all, or which may be one that has a GPT.
IMPORT_OF_GPT = re.compile(r"^ *(?:from \.*(\w[\w.]*) import (?:.*GPT(?:Config)?\b|\*)"
                           r"|import ([\w.]*(?:model|gpt)[\w.]*)|import ([\w.]+) as model\b)",
                           re.MULTILINE)


def checkpoint_path(out_dir: str | Path) -> Path:
    """Where the checkpoint is, or will be once a training has saved it."""
    path = Path(out_dir)
    is_file = os.path.isfile(path) or path.suffix == ".pt"
    return path if is_file else path / "ckpt.pt"


def huggingface_config(folder: Path) -> dict | None:
    """The config.json of a Hugging Face model in this folder; None if there is none."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    config = read_json(path)
    # A config.json of 2019 has only sizes, and no model_type.
    has_sizes = all(config.keys() & names for names in HUGGINGFACE_NAMES.items())
    return config if "model_type" in config or has_sizes else None


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights of a Hugging Face model, and its config.json."""
    for weights in WEIGHTS:
        if os.path.isfile(folder / weights) or os.path.isfile(folder / f"{weights}.index.json"):
            with suppress(OSError, ValueError): # such as a damaged config.json
                return bool(huggingface_config(folder))
    return False


def missing_weights(folder: Path) -> str:
    """Why a folder with a config.json has no weights, and what to do; '' if nothing shows why."""
    if not os.path.lexists(folder / "config.json"):
        return ""
    files = sorted(folder.glob("*"))
    for path in files:
        if path.suffix in (".json", ".safetensors", ".bin") and not os.path.exists(path):
            return (f"{path} is a link to {os.readlink(path)}, which is not there: repair or "
                    "replace the link, or download the model again")
    for cache in folder.parent.parent / "blobs", folder / ".cache/huggingface/download":
        for path in cache.glob("*.incomplete"):
            return f"{path} is an incomplete download: download the model again"
    for path in files:
        if WEIGHT_FILE.fullmatch(path.name) and not has_weights(folder):
            index = re.sub(r"-\d+-of-\d+", "", path.name) + ".index.json"
            return (f"{path} is a shard, but {index}, which names the shards, is missing: copy it "
                    "there")
    return ""


def huggingface_folder(path: Path) -> Path:
    """The folder of a Hugging Face model if path is one of its files; otherwise path."""
    is_part = WEIGHT_FILE.fullmatch(path.name) or path.name == "config.json"
    # From a folder with safetensors, a .bin file is not read.
    is_unread = path.suffix == ".bin" and any(path.parent.glob("model*.safetensors"))
    if is_part and not is_unread and os.path.isfile(path) and has_weights(path.parent):
        return path.parent
    return path


def is_hub_id(name: str) -> bool:
    """Whether a name may be an id of the hub: it is no path, and not the name of a file."""
    is_id = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name)
    return bool(is_id) and not SAVED.fullmatch(Path(name).name)


def is_huggingface(setting: str, value: str) -> bool:
    """Whether a setting names a model of Hugging Face, and no ckpt.pt.

    setting: init_from, out_dir, or name, the argument of sampling.load, which means either.
    """
    path = Path(value)
    if setting == "init_from":
        return True
    if setting == "name" and not os.path.lexists(path):
        return is_hub_id(value)
    if setting == "name" and huggingface_config(path) and not (path / "ckpt.pt").is_file():
        return True
    path = checkpoint_path(path)
    return huggingface_folder(path) != path # a file of its weights


# ---- its code and its data

def code_folders(checkpoint: Path) -> dict[Path, list[Path]]:
    """The folders where the code and the data of a ckpt.pt may lie, each with the files of its GPT:
    from its own folder upwards to the first with such a file; the same from where a link leads, and
    from the working directory if that has a train.py, because out_dir may lie anywhere.
    """
    starts = [Path(os.path.abspath(checkpoint)), checkpoint.resolve()]
    if os.path.isfile("train.py"): # a clone of nanoGPT
        starts.append(Path.cwd() / "ckpt.pt")
    folders = {}
    for start in starts:
        modules: list[str] = []
        found: dict[Path, list[Path]] = {}
        for folder in start.parents:
            modules += modules_with_gpt(folder)
            found[folder] = module_files(folder, [*modules, "model"])
            if found[folder]:
                break
        else: # what lies far away belongs to others
            found = {folder: [] for folder in start.parents[:2]}
        folders |= found
    return folders


def modules_with_gpt(folder: Path) -> list[str]:
    """The modules from which the sample.py and the train.py in a folder have their GPT."""
    modules = []
    for script in "sample.py", "train.py":
        with suppress(*UNREADABLE): # Python cannot run it either
            text = ast.unparse(parse_python(folder / script)) # each statement in a line
            modules += map("".join, IMPORT_OF_GPT.findall(text))
            if re.search("^class GPT\\b", text, re.MULTILINE):
                modules.append(script.removesuffix(".py"))
    return modules


def module_files(folder: Path, modules: Iterable[str]) -> list[Path]:
    """The files of these modules in a folder, and of their packages, that may have a GPT."""
    files = []
    for module in dict.fromkeys(modules):
        place = folder / module.replace(".", "/")
        packages = [path for path in (place, *place.parents) if folder in path.parents]
        places = *(package / "__init__.py" for package in packages), place.with_suffix(".py")
        files += filter(may_have_gpt, places)
    return files


def may_have_gpt(file: Path) -> bool:
    """Whether a file imports anything, or names a GPT, as far as its text says."""
    with suppress(OSError): # read_source says so
        return os.path.isfile(file) and bool(re.search(rb"import|GPT|coding", file.read_bytes()))
    return True


# ---- what to do where no model is found

def setting_for(path: Path) -> str:
    """The setting that loads the model at path; '' if there is none."""
    is_saved = SAVED.fullmatch(path.name) and os.path.isfile(path)
    if is_saved or os.path.isfile(path / "ckpt.pt"):
        return f"out_dir={quote(str(path))}"
    return f"init_from={quote(str(path))}" if has_weights(path) else ""


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Those of these paths that hold a model, each once."""
    def newness(path: Path) -> tuple:
        # A Trainer numbers its folders; copies of them may have any time.
        step = re.fullmatch(r"checkpoint-(\d+)", path.name)
        files = filter(os.path.isfile, (path / "ckpt.pt", path / "config.json"))
        changed = os.path.getmtime(next(files, path))
        return int(step[1]) if step else -1, changed, path.name

    models = {os.path.realpath(path): path for path in paths if setting_for(path)}
    return sorted(models.values(), key=newness, reverse=True)


def advice(path: Path) -> str:
    """Which models are at path, in it, or else near it, and the setting for the first one."""
    wanted = checkpoint_path(path)
    for part in wanted, *wanted.parents:
        if os.path.islink(part) and not os.path.exists(part):
            return (f"{part} is a link to {os.readlink(part)}, which is not there: repair or "
                    "replace the link")
        if os.path.isdir(part) and not os.access(part, os.X_OK):
            return f"you have no permission to look into {part}: ask its owner for a copy"
    # A missing path may be called like a file.
    place = path
    if os.path.isfile(path) or (SAVED.fullmatch(path.name) and not os.path.isdir(path)):
        place = path.parent
    # The folder of a file counts only as a whole Hugging Face model. Its files come next.
    itself = [place] if place == path or has_weights(place) else []
    if reason := missing_weights(place):
        return name_models(place, itself) or reason
    here = [path, *sorted(place.glob("*"))]
    deeper = [*sorted(place.glob("*/*")), *place.glob("*/snapshots/*")]
    near = [place.parent, *place.parent.glob("*"), *Path().glob("*")]
    beside = [folder for folder in near if os.path.isdir(folder)]
    # From near to far. Where like is no folder, similar names come first.
    for like, places in (place, itself), (path, here), (place, deeper), (place, beside):
        answer = name_models(like, places) or describe_other(places)
        if answer:
            return answer
    # What is called gpt2 here would be taken for the model.
    gpt2 = "openai-community/gpt2" if os.path.lexists("gpt2") else "gpt2"
    return f"pass out_dir=FOLDER_OR_FILE; for GPT-2, pass init_from={gpt2}"


def name_models(like: Path, places: Iterable[Path]) -> str:
    """Which places hold a model, and the setting of the first one; '' if none.

    The newest comes first, or before it, what is called like a path that is no folder.
    """
    names = [str(model) for model in newest_first(places)]
    if not names:
        return ""
    if not os.path.isdir(like):
        nearest = difflib.get_close_matches(str(like), names, len(names))
        names = list(dict.fromkeys([*nearest, *names]))
    first = Path(names[0])
    if WEIGHT_FILE.fullmatch(first.name):
        return (f"{first} lacks its config.json: copy that beside it, and pass "
                f"init_from={quote(str(first.parent))}; for weights that nanoGPT trained, "
                f"pass {setting_for(first)}")
    if len(names) > 5:
        names[5:] = ["..."]
    return f"found {', '.join(names)}; pass {setting_for(first)}"


def describe_other(files: Iterable[Path]) -> str:
    """What the first of these files is that is no model for us; '' if there is none."""
    for file in filter(os.path.isfile, files):
        for pattern, kind in OTHERS.items():
            if file.match(pattern):
                return (f"{file} is {kind}: docs/usage.md#other-formats says how to make a model "
                        "of it")
    return ""
