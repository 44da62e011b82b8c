"""The workbench of one run: configuration, folder, model, data and tasks, each opened once.

It joins nothing: stages are joined in ``pipeline``, and this gives them what they share.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qbench import __version__
from qbench.backends import Backend, Variant, backend_named
from qbench.config import Config, make_config
from qbench.data import Prepared, prepare_splits
from qbench.errors import ModelError, RunDirError
from qbench.graph.folders import max_length_of, resolve_folder
from qbench.graph.layers import find_layers, select_layers
from qbench.graph.model import Model, open_stored
from qbench.graph.reading import files_of
from qbench.journal import flat_keys
from qbench.lowering.overflow import find_overflow
from qbench.provenance import (
    installed_versions,
    machine_type,
    provenance,
    sha256_of_files,
    sha256_of_json,
)
from qbench.records import Layer, Layers, to_dict
from qbench.rundir import RunDir
from qbench.runtime.loading import LoadOptions, load_model, resolve_source, store_card
from qbench.runtime.ort import SessionSettings, settings_for
from qbench.runtime.presence import check_present
from qbench.sensitivity.timing import TIMED_BATCHES, spread_batches
from qbench.tasks import Batch, Task, Tokenizer, load_tokenizer, make_batches, make_task
from qbench.tasks.padding import sized_batches

#: Packages whose version may change a number of the sweep.
_DECIDING = ("onnxruntime", "onnxruntime-gpu", "numpy", "scipy", "onnx-ir")
#: Texts on which an exported model is checked against torch.
_CHECK_TEXTS = 8

#: What a run whose sweep was begun may not change any more.
_FIXED = (
    *("model.", "data.", "task.kind", "task.metric", "calibrate.", "plan.backend", "run.seed"),
    "sweep.batch",
)

_HEADS = {
    "classification": "classification",
    "embedding": "embedding",
    "retrieval": "embedding",
    "similarity": "embedding",
}


class Workbench:
    """What the stages of one run share.

    Args:
        config: The configuration.
        run: The folder of the run.
    """

    def __init__(self, config: Config, run: RunDir) -> None:
        """Keep both; nothing is opened yet."""
        self.config, self.run = config, run
        self.backend: Backend = backend_named(config.plan.backend)
        self.settings: SessionSettings = settings_for(self.backend, config.run.thread_count)

    @classmethod
    def start(cls, config: Config) -> Workbench:
        """Begin a run, or continue the unfinished one of the same configuration.

        Raises:
            MissingDependencyError: If what the backend runs on is not here.
        """
        check_present(backend_named(config.plan.backend))
        said = config.model_dump(mode="json")
        fingerprint = sha256_of_json(said)
        run = RunDir.resume_or_create(
            config.run.results, config.run.id, config.model.source, fingerprint
        )
        try:
            run.check_machine()
            _check_same_request(run, said)
        except RunDirError:
            run.unlock()
            raise
        run.write_run(provenance(said, config.run.seed) | {"config": said})
        return cls(config, run)

    @classmethod
    def reopen(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Workbench:
        """Open a run that was begun before, with the configuration that it has.

        Args:
            path: The run's folder.
            overrides: Values that replace the configuration's, by dotted key.

        Raises:
            RunDirError: If there is no run, or it tells no configuration.
            ConfigError: If a value is wrong.
            MissingDependencyError: If what the backend runs on is not here.
        """
        run = RunDir.open(path)
        said = run.read_run().get("config")
        if not said:
            raise RunDirError(f"{path} tells no configuration; it was not made by qbench run")
        config = make_config(said, overrides, origin=f"configuration of {path}")
        check_present(backend_named(config.plan.backend))
        run.lock()
        run.check_machine()
        if overrides:
            run.write_run({"config": config.model_dump(mode="json")})
        return cls(config, run)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ModelError: If the model is an ONNX file and none was named.
        """
        model = self.config.model
        source = Path(resolve_source(model.source))
        is_file = source.suffix.lower() == ".onnx" or source.is_file()
        if is_file and not model.tokenizer:
            raise ModelError(
                f"{model.source!r} is an ONNX file and brings no tokenizer; name one with "
                "--tokenizer (model.tokenizer): a Hugging Face folder, a folder with "
                "tokenizer.json, module:callable or file.py:callable"
            )
        folder = None if is_file else resolve_folder(str(source), model.revision)
        spec = resolve_source(model.tokenizer) if model.tokenizer else str(folder)
        stated = max_length_of(folder) if folder is not None else None
        limits = [n for n in (model.max_length, stated) if n]
        return load_tokenizer(
            spec,
            min(limits) if limits else None,
            model_dir=folder or source.parent,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
        )

    @functools.cached_property
    def data(self) -> Prepared:
        """The frozen splits; they are told in ``run.json``."""
        tokenizer = self.tokenizer

        def token_keys(texts: Any) -> list[tuple[int, ...]]:
            return [tuple(item["input_ids"]) for item in tokenizer(list(texts))]

        prepared = prepare_splits(self.config.data, self.config.task.kind, token_keys)
        self.run.write_run(
            {
                "data": {
                    "name": prepared.name,
                    "source": self.config.data.source,
                    "folder": str(prepared.folder),
                    "sha256": prepared.sha256,
                    "samples": dict(prepared.splits.samples),
                    "licence": prepared.manifest.get("licence"),
                    "remarks": list(prepared.splits.remarks),
                }
            }
        )
        return prepared

    @functools.cached_property
    def model(self) -> Model:
        """The model in normal form, exported once a run and checked against torch."""
        wanted = self._model_fingerprint()
        folder = self.run.model_dir
        with contextlib.suppress(ModelError):  # none yet, or damaged: it is made from its source
            stored = open_stored(folder)
            if stored.card.get("fingerprint") == wanted:
                return stored
            if self.run.has_journal:
                raise RunDirError(
                    f"{self.run.path} was begun with another content of {stored.source!r}, or "
                    "other versions of torch, transformers or onnx-ir; use another run id, or "
                    "delete the folder to begin anew"
                )
        options = self.config.model
        loaded = load_model(
            options.source,
            folder,
            LoadOptions(
                head=_HEADS.get(self.config.task.kind, "output"),
                pooling=options.pooling,
                normalize=options.normalize,
                output=options.output,
                tokenizer=options.tokenizer,
                max_length=options.max_length,
                revision=options.revision,
                trust_remote_code=options.trust_remote_code,
                samples=self._check_feeds(),
            ),
        )
        model = store_card(loaded, {**loaded.card, "fingerprint": wanted})
        self.run.write_run({"model": _told(model)})
        return model

    def _model_fingerprint(self) -> str:
        source = Path(resolve_source(self.config.model.source))
        if not source.is_file():
            source = resolve_folder(str(source), self.config.model.revision)
        files = files_of(source) if source.is_file() else _weight_files(source)
        said = self.config.model.model_dump(mode="json")
        return sha256_of_json(
            {
                "model": said,
                "head": _HEADS.get(self.config.task.kind, "output"),
                "files": sha256_of_files(files),
                "versions": installed_versions(("torch", "transformers", "onnx-ir", "qbench")),
                "machine": machine_type(),
            }
        )

    def _check_feeds(self) -> dict[str, np.ndarray]:
        """Return padded token ids of a few real texts."""
        frame = self.data.splits.calibration
        column = next(name for name in ("query", "text") if name in frame)
        texts = [str(text) for text in frame[column].head(_CHECK_TEXTS)]
        encoded = self.tokenizer(texts if len(texts) > 1 else texts * 2)
        longest = max(max(len(item["input_ids"]) for item in encoded), 3)
        ids = np.full((len(encoded), longest), self.tokenizer.pad_id, np.int64)
        mask = np.zeros_like(ids)
        for row, item in enumerate(encoded):
            ids[row, : len(item["input_ids"])] = item["input_ids"]
            mask[row, : len(item["input_ids"])] = 1
        return {"input_ids": ids, "attention_mask": mask}

    @functools.cached_property
    def layers(self) -> Layers:
        """Every layer of the model."""
        found = find_layers(self.model.ir)
        self.run.write_layers(found)
        if not found.layers:
            raise ModelError(
                f"{self.config.model.source!r} has no layer that could take a lower precision: "
                f"its {len(found.unlayered)} nodes hold no product with a weight, no lookup, no "
                "normalisation"
            )
        return found

    @functools.cached_property
    def chosen(self) -> tuple[Layer, ...]:
        """The layers that include and exclude leave."""
        sweep = self.config.sweep
        return select_layers(self.layers, sweep.include, sweep.exclude)

    @functools.cached_property
    def kept(self) -> Mapping[str, str]:
        """Layers that fp16 cannot hold, where it is the high precision, each with the reason.

        They are known once the run was calibrated.
        """
        if self.backend.variant is not Variant.ISLANDS:
            return {}
        return find_overflow(self.model.ir, self.layers, self.run.read_ranges())

    def task(self, split: str) -> Task:
        """Return the task on a split (made once)."""
        return self._tasks(split)[0]

    def batches(self, split: str) -> tuple[Batch, ...]:
        """Return the frozen batches of a split (made once)."""
        return self._tasks(split)[1]

    def timed_batches(self) -> tuple[Batch, ...]:
        """Return the batches of the sweep split that times are measured on, over all lengths."""
        size = self.config.sweep.batch
        if size is not None:
            encoded, pad_id = self.task("sweep").encoded, self.tokenizer.pad_id
            return sized_batches(encoded, self.model.inputs, size, TIMED_BATCHES, pad_id)
        batches = self.batches("sweep")
        return tuple(batches[i] for i in spread_batches(batches, TIMED_BATCHES))

    def compared_batches(self) -> tuple[Batch, ...]:
        """Return the batches that engines are timed on beside each other.

        Where no size was asked for, single texts count as much as the sweep's batches: an engine
        of many small kernels is slow on the former alone.
        """
        if self.config.sweep.batch is not None:
            return self.timed_batches()
        encoded, pad_id = self.task("sweep").encoded, self.tokenizer.pad_id
        singles = sized_batches(encoded, self.model.inputs, 1, TIMED_BATCHES // 2, pad_id)
        return (*singles, *self.timed_batches()[::2])

    @functools.cache  # noqa: B019 — a workbench lives as long as its run
    def _tasks(self, split: str) -> tuple[Task, tuple[Batch, ...]]:
        rows = self.data.splits.named(split)
        task = make_task(self.config.task, rows, self.tokenizer, classes=self._classes())
        batches = make_batches(
            task.encoded,
            self.model.inputs,
            max_tokens=self.config.sweep.max_tokens,
            pad_id=self.tokenizer.pad_id,
        )
        return task, batches

    def _classes(self) -> Any:
        if self.config.task.kind != "classification":
            return None
        labels = self.model.card.get("id2label")
        if labels:
            return {str(name): int(index) for index, name in labels.items()}
        shape = next(s.shape for s in self.model.outputs if s.name == self.model.output)
        return shape[-1] if shape and isinstance(shape[-1], int) else None

    def journal_key(self, batches_sha256: str) -> dict[str, Any]:
        """Return what every number of the sweep depends on."""
        return {
            "model_sha256": self.model.sha256,
            "data_sha256": self.data.sha256,
            "batches_sha256": batches_sha256,
            "task": to_dict(self.config.task.model_dump(mode="json", exclude={"expect"})),
            "calibrate": self.config.calibrate.model_dump(mode="json"),
            "backend": self.backend.name,
            "session_options": dict(self.backend.session_options),
            "seed": self.config.run.seed,
            "versions": {"qbench": __version__, **installed_versions(_DECIDING)},
        }


def _check_same_request(run: RunDir, said: Mapping[str, Any]) -> None:
    """Refuse a run whose sweep was begun with another model, data or task; name the keys."""
    known = run.read_run().get("config")
    if not known or not run.has_journal:
        return
    before, now = dict(flat_keys(known)), dict(flat_keys(said))
    differing = [
        f"{key} was {before.get(key)!r} and is now {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if key.startswith(_FIXED) and before.get(key) != now.get(key)
    ]
    if differing:
        raise RunDirError(
            f"{run.path} was begun with another request: {'; '.join(differing)}. Use another run "
            "id, or delete the folder to begin anew"
        )


def _weight_files(folder: Path) -> list[Path]:
    patterns = ("*.safetensors", "*.bin", "config.json", "modules.json", "*/config.json")
    return sorted({file for pattern in patterns for file in folder.glob(pattern)})


def _told(model: Model) -> Mapping[str, Any]:
    card = {k: v for k, v in model.card.items() if k != "fingerprint"}
    return {"source": model.source, "sha256": model.sha256, **card}
