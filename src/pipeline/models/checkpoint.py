"""A checkpoint on disk as a table of named tensors, opened by its headers alone.

safetensors checks; the places of the bytes are read from the headers (8 bytes little-endian length,
then JSON), so that a merge can copy them without reading. No torch is imported, and no pickle read.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from blake3 import blake3

from pipeline.errors import PipelineError
from pipeline.files import refuse_special
from pipeline.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from pipeline.models.names import (
    HEAD,
    embedding_beside,
    is_embedding,
    is_later_head,
    tensor_names,
    unwrapped,
)
from pipeline.models.settings import check_settings

if TYPE_CHECKING:
    import numpy as np
    import torch

DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
}  # torch's name -> safetensors' name
TORCH_NAMES = {short: long for long, short in DTYPES.items()}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
PIECE_BYTES = 2**20  # stays in the cache; a multiple of every item size: no value is cut in two
# what digests begin with; those of the first versions begin with sha256 and are never compared
KIND = "blake3"
LATER_HEADS = (
    "mtp_num_hidden_layers",
    "num_nextn_predict_layers",
)  # keys of config.json that declare such heads
TIED_BY_CLASS = (
    "cohere",
    "cohere2",
    "gemma",
    "gemma2",
    "gemma3_text",
)  # where config.json does not say it


def torch_dtype(dtype: str) -> torch.dtype:
    """Return the torch dtype of a safetensors dtype such as BF16."""
    import torch

    return getattr(torch, TORCH_NAMES[dtype])


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: safetensors dtype (F32, BF16, ...), shape, and where its bytes lie in
    which file.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int  # bytes from the start of the file
    key: str  # its name in the file
    stream: BinaryIO = field(compare=False, repr=False)  # of the file

    def read(self, begin: int, size: int) -> np.ndarray:
        """So many of its bytes, fresh.

        Threads may read at once. By reading, not by a map of the file: fewer page faults.
        """
        import numpy as np

        data = rest = np.empty(size, np.uint8)
        while rest.size:  # one call reads 2 GB at most
            count = os.preadv(
                self.stream.fileno(), [rest.data], self.offset + begin + size - rest.size
            )
            if not count:
                raise PipelineError(f"{self.file} became shorter while it was read: copy it again")
            rest = rest[count:]
        return data

    def pieces(self) -> Iterator[memoryview]:
        """Yield the raw bytes in pieces of at most 1 MB."""
        starts = range(0, self.nbytes, PIECE_BYTES)
        return (self.read(start, min(PIECE_BYTES, self.nbytes - start)).data for start in starts)

    def digest(self) -> str:
        """Its digest, as `hash_tensor` has it. Refuses NaN and infinities, naming the file."""
        return digest_tensor(self.dtype, self.shape, self.pieces(), f"{self.file}: {self.key}")


@dataclass
class Checkpoint:
    """A folder with config.json and safetensors weights. Open it with `Checkpoint.open(folder)`."""

    folder: Path
    config: dict[str, Any]
    infos: dict[str, TensorInfo]

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read the headers of a checkpoint: one model.safetensors, or shards with an index.

        Raises PipelineError for a missing folder, config or shard, for weights that are not
        safetensors, for a broken or truncated file, and for a head that contradicts
        tie_word_embeddings.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise PipelineError(f"{folder} is not a folder: give the folder of a checkpoint")
        files = weight_files(folder)
        if not (folder / "config.json").is_file():
            raise PipelineError(f"{folder} has no config.json: it is not a complete checkpoint")
        checkpoint = cls(folder, read_json(folder / "config.json"), _read_tensors(folder, files))
        checkpoint._settle_head()
        return checkpoint

    @property
    def model(self) -> Checkpoint:
        """The whole model that is read: itself, of an adapter its base."""
        return self

    @cached_property
    def state(self) -> str:
        """The folder with size and time of its weight files when they were opened: what the files
        hold, as far as it can be told without reading them.
        """
        stats = {info.file: os.fstat(info.stream.fileno()) for info in self.infos.values()}
        files = [
            (str(file), stat.st_size, stat.st_mtime_ns) for file, stat in sorted(stats.items())
        ]
        return f"{self.folder} {files}"

    @property
    def later_heads(self) -> bool:
        """True if the files hold a head of later tokens (mtp.*), which no model in memory and no
        merge has.
        """
        return any(
            is_later_head(key) for file in weight_files(self.folder) for key in read_header(file)
        )

    @property
    def names(self) -> list[str]:
        """The names of the stored tensors, sorted; a tied head is the embedding and has none of its
        own.
        """
        return sorted(self.infos)

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape, file and offset of one tensor."""
        if name not in self.infos:
            raise PipelineError(f"{self.folder} has no tensor {name!r}")
        return self.infos[name]

    def stored(self, name: str) -> TensorInfo | None:
        """Where the tensor's bytes are stored; None for a composed model whose tensor is stored
        nowhere.
        """
        return self.info(name)

    def stored_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of a tensor seen as a matrix (`arrays.matrix`) in its own dtype, (stop - start,
        columns), fresh.

        Only these are read, and threads may read at once.
        """
        from pipeline.models.arrays import STORED, matrix

        info, columns = self.info(name), matrix(self.info(name).shape)[1]
        if info.dtype not in STORED:
            raise PipelineError(
                f"{self.folder}: {name} is {info.dtype}, not one of {', '.join(DTYPES)}"
            )
        row = columns * ITEM_BYTES[info.dtype]
        return (
            info.read(start * row, (stop - start) * row)
            .view(STORED[info.dtype])
            .reshape(stop - start, columns)
        )

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return the rows as float32."""
        return self.stored_rows(name, start, stop).astype("f4", copy=False)

    @property
    def embedding(self) -> str | None:
        """The name of the matrix of the tokens' embeddings."""
        return next(filter(is_embedding, self.infos), None)

    def written_name(self, name: str) -> str:
        """Return the name under which a merge laid out as this checkpoint stores a tensor: that of
        its file.
        """
        return unwrapped(self.info(name).key)

    @property
    def files(self) -> dict[Path, list[str]]:
        """The weight files, by name, each with its tensors in stored order."""
        layout: dict[Path, list[str]] = {}
        for name, info in sorted(
            self.infos.items(), key=lambda item: (item[1].file, item[1].offset)
        ):
            layout.setdefault(info.file, []).append(name)
        return layout

    @property
    def tied_head(self) -> bool:
        """Whether the output head is the embedding matrix: from config.json, else the class's own
        default.
        """
        config = text_settings(self.config)
        default = config.get("model_type") in TIED_BY_CLASS or HEAD not in self.infos
        return bool(
            self.config.get("tie_word_embeddings", config.get("tie_word_embeddings", default))
        )

    def _settle_head(self) -> None:
        """Keep one of a tied pair, as the embedding, so that no tensor is merged or counted
        twice.
        """
        embedding, head = self.embedding, self.infos.get(HEAD)
        if not self.tied_head and embedding and not head:
            raise PipelineError(
                f"{self.folder} has no {HEAD} although tie_word_embeddings is false: copy it again"
            )
        if self.tied_head and head:
            if embedding and self.infos[embedding].digest() != head.digest():
                raise PipelineError(
                    f"{self.folder} stores a {HEAD} that differs from {embedding} although the head"
                    " is tied: set tie_word_embeddings to false in its config.json, or remove the"
                    " head"
                )
            del self.infos[HEAD]
            if embedding:
                self.infos |= {}
            else:
                self.infos |= {
                    embedding_beside(self.infos, self.config.get("model_type", "")): head
                }


def text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the decoder in a config.json: the whole, or the part of a model that
    also sees or hears.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        return dict(inner)
    return dict(config)


def with_rows(config: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return a config.json for another number of rows of the embeddings."""
    inner = config.get("text_config")
    if isinstance(inner, dict):
        config = config | {"text_config": with_rows(inner, rows)}
    if "vocab_size" in config:
        return config | {"vocab_size": rows}
    return config


def without_later_heads(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json that declares no head of later tokens."""
    inner = config.get("text_config")
    if isinstance(inner, dict):
        config = config | {"text_config": without_later_heads(inner)}
    return {key: 0 if key in LATER_HEADS and value else value for key, value in config.items()}


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter.

    Raises PipelineError for one that holds a whole model too.
    """
    whole = next((name for name in (SINGLE, INDEX) if (folder / name).is_file()), None)
    adapter = next(
        (name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if (folder / name).is_file()), None
    )
    if whole and adapter:
        raise PipelineError(
            f"{folder} holds two models, {whole} and {adapter}: move the one that is not meant to"
            " another folder"
        )
    return adapter == ADAPTER_CONFIG


def refuse_pickles(folder: Path) -> None:
    """Raise PipelineError, with the remedy, for a folder of pickled weights."""
    pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pt*")])
    if pickled:
        raise PipelineError(
            f"{folder} holds pickled weights ({pickled[0].name}); only safetensors are read:"
            " convert them by"
            " AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER), where you"
            " trust the file"
        )


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint.

    Raises: PipelineError: there are none, or a shard is missing.
    """
    if is_adapter(folder) or (folder / ADAPTER_WEIGHTS).is_file():
        raise PipelineError(
            f"{folder} holds a LoRA adapter, not a whole model: merge it into its base first"
        )
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        refuse_pickles(folder)
        raise PipelineError(f"{folder} has no {SINGLE} and no {INDEX}")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise PipelineError(f"{index} has no weight_map of tensors to files: copy it again")
    shards = sorted(set(places.values()))
    for shard in shards:
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise PipelineError(
                f"{index} names the shard {shard!r}, which is not in the folder: copy it again"
            )
    return [folder / shard for shard in shards]


def _read_tensors(folder: Path, files: list[Path]) -> dict[str, TensorInfo]:
    """Return the tensors of a model's files by their one name (models/names.py)."""
    stored: dict[str, TensorInfo] = {}
    for file in files:
        for key, info in read_header(file).items():
            if key in stored:
                raise PipelineError(
                    f"{folder} stores {key} twice, in {stored[key].file.name} and {file.name}"
                )
            stored[key] = info
    if files and files[0].name != SINGLE:
        for key, shard in read_json(folder / INDEX)["weight_map"].items():
            if key not in stored or stored[key].file.name != shard:
                raise PipelineError(
                    f"{folder / INDEX} places {key} in {shard}, which does not hold it"
                )
    infos: dict[str, TensorInfo] = {}
    for key, name in tensor_names(stored).items():
        if name in infos:
            raise PipelineError(
                f"{folder} stores {name} twice, as {infos[name].key} and as {key}: remove one"
            )
        infos[name] = stored[key]
    if not infos:
        raise PipelineError(f"{folder} holds no tensors")
    return infos


def check_headers(folder: Path) -> None:
    """Raise PipelineError where a file of weights is truncated, a shard is missing, or a header is
    broken.
    """
    if (folder / ADAPTER_WEIGHTS).is_file():
        read_header(folder / ADAPTER_WEIGHTS)
    else:
        _read_tensors(folder, weight_files(folder))


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises: PipelineError: it is not one, or a setting has another type than expected.
    """
    refuse_special(path)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # the latter of brackets in brackets
        raise PipelineError(f"{path} is not valid JSON ({error}): copy it again") from error
    if not isinstance(value, dict):
        raise PipelineError(
            f"{path} holds a JSON {type(value).__name__}, not an object: copy it again"
        )
    check_settings(path, value)
    return value


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors of one safetensors file.

    Raises: PipelineError: safetensors does not read the file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        safe_open(file, "np")
    except SafetensorError as error:
        raise PipelineError(
            f"{file} is truncated or has a broken safetensors header ({error}): copy it again"
        ) from error
    stream = open(file, "rb", buffering=0)  # noqa: SIM115 - closed with the last tensor
    length = int.from_bytes(stream.read(8), "little")
    header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    infos = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        place = 8 + length + begin
        infos[name] = TensorInfo(
            entry["dtype"], tuple(entry["shape"]), end - begin, file, place, name, stream
        )
    return infos


def header_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Return the start of a safetensors file that holds these (dtype, shape), in this order; their
    bytes follow it.
    """
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt"}
    }  # transformers refuses files without it
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the data aligned for mapped reads
    return struct.pack("<Q", len(text)) + text


def hash_tensor(
    dtype: str, shape: tuple[int, ...], pieces: Iterable[memoryview]
) -> tuple[str, bool]:
    """`blake3:...` over bytes, dtype and shape of a tensor, and whether all values are finite: one
    read serves both.
    """
    from pipeline.models.arrays import is_finite

    result, finite = blake3(), True
    for piece in pieces:
        result.update(piece)
        finite = finite and is_finite(piece, dtype)
    result.update(f"{dtype} {list(shape)}\n".encode())
    return f"{KIND}:{result.hexdigest()}", finite


def digest_tensor(
    dtype: str, shape: tuple[int, ...], pieces: Iterable[memoryview], label: str
) -> str:
    """Return the digest of a tensor, as `hash_tensor` has it.

    Refuses NaN and infinities, naming `label`.
    """
    value, finite = hash_tensor(dtype, shape, pieces)
    if not finite:
        raise PipelineError(
            f"{label} holds NaN or infinite values: train it again or choose another"
        )
    return value


def digest_tensors(folder: Path) -> dict[str, str]:
    """Return the digest of every tensor of a checkpoint, or of an adapter, by name.

    Raises: PipelineError: a value is NaN or infinite.
    """
    adapter = folder / ADAPTER_WEIGHTS
    if adapter.is_file():
        infos = read_header(adapter)
    else:
        infos = Checkpoint.open(folder).infos
    return {name: info.digest() for name, info in sorted(infos.items())}


def weights_root(digests: Mapping[str, str]) -> str:
    """One `blake3:...` for a whole checkpoint, whatever its sharding: over its sorted names and
    digests.
    """
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()
    return f"{KIND}:{blake3(lines).hexdigest()}"
