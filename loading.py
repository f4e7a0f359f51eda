"""A network and its tokenizer, from where the settings say."""
from devices import out_of_memory
from model import GPT
from tokenizer import load_tokenizer
from weights import find_checkpoint, load_checkpoint, load_huggingface


def load(init_from, out_dir):
    """The network on the CPU, its tokenizer, and where they are from.

    ValueError or OSError where there is none, or what is there is no network or does not fit together.
    """
    source = find_checkpoint(out_dir) if init_from == "resume" else init_from
    try:
        if init_from == "resume":
            model_args, state_dict, config = load_checkpoint(source)
            table = source.parent, config.get("dataset")
        else:
            model_args, state_dict = load_huggingface(source)
            table = None, None
        model = GPT.from_state_dict(model_args, state_dict)
    except (OSError, MemoryError):
        raise
    except Exception as e: # what is no network trips torch in many ways
        if out_of_memory(e):
            raise
        named = isinstance(e, ValueError) and str(source) in str(e)
        raise ValueError(f"{e!s:.2000}" if named else f"cannot load {source}: {e!s:.1000}") from None
    return model, load_tokenizer(*table, model.config.vocab_size), source
