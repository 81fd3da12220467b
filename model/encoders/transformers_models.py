"""Loads models of transformers from local folders: safetensors alone, and no code of a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from adamae.common.devices import is_structure_only
from adamae.common.errors import InputError
from adamae.model.encoders.folders import explain_damage, require_safetensors


def import_transformers() -> Any:
    """Import transformers, which takes seconds; raise InputError if it is not installed."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise InputError(
            "encoders of transformers need a package that is not installed: pip install"
            " 'transformers>=5'"
        ) from error
    return transformers


def read_model_config(class_name: str, folder: Path) -> Any:
    """Read the configuration of a model, such as a VJEPA2Config; raise InputError if it cannot.

    Of a model of images and texts, a configuration of the vision part alone can be asked for.
    """
    config_class = getattr(import_transformers(), class_name)
    with explain_damage(folder, "transformers"):
        return config_class.from_pretrained(folder, local_files_only=True)


def load_model(
    class_name: str,
    folder: Path,
    config: Any,
    renamed: dict[str, str] | None = None,
    **options: Any,
) -> Any:
    """Load a model in fp32, on the CPU.

    renamed: patterns of names in the file, and what the class calls them. options: of the class.
    Raise InputError if weights are missing, damaged, or not in safetensors.
    """
    transformers = import_transformers()
    require_safetensors(folder)
    model_class = getattr(transformers, class_name)
    if is_structure_only():
        return model_class(config, **options)
    with _quiet(transformers), explain_damage(folder, "transformers"):
        model, report = model_class.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            key_mapping=renamed,
            **options,
        )
    # transformers would initialize them at random, and only print that.
    missing = sorted(report["missing_keys"])
    if missing:
        raise InputError(
            f"{folder} cannot be used: {len(missing)} weights of a {class_name} are missing, such"
            f" as {missing[0]}"
        )
    return model


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Leave out the report of weights that are not used, and the progress bar."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    had_progress_bar = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_progress_bar:
            logging.enable_progress_bar()
