"""A checkpoint on disk as a table of named tensors, opened by reading only its headers.

safetensors checks the file. The places of the bytes are read from the header (8 bytes little-endian
length, then JSON), so a merge can copy tensors without reading them. No torch is imported, and no
pickle is read.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
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

# torch's name -> safetensors' name
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
TORCH_NAMES = {short: long for long, short in DTYPES.items()}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
PIECE_BYTES = 2**20  # fits into the cache, and is a multiple of every item size
# The prefix of digests. Digests of the first versions begin with sha256 and are never compared
KIND = "blake3"
# The keys of config.json that declare heads of later tokens, without any
NO_LATER_HEADS = {"mtp_num_hidden_layers": 0, "num_nextn_predict_layers": 0}
# Types whose head is tied by default
TIED_BY_CLASS = ("cohere", "cohere2", "gemma", "gemma2", "gemma3_text")


def torch_dtype(dtype: str) -> torch.dtype:
    """Return the torch dtype of a safetensors dtype such as BF16."""
    import torch

    return getattr(torch, TORCH_NAMES[dtype])


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor: its safetensors dtype (F32, BF16, ...), shape, and place in a file."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int  # bytes from the start of the file
    key: str  # its name in the file
    stream: BinaryIO = field(compare=False, repr=False)  # the open file

    def read(self, begin: int, size: int) -> np.ndarray:
        """Read `size` bytes of the tensor into a new array.

        Threads may read at once. A map of the file would cause more page faults.
        """
        import numpy as np

        data = rest = np.empty(size, np.uint8)
        end = self.offset + begin + size
        while rest.size:  # one call reads at most 2 GB
            count = os.preadv(self.stream.fileno(), [rest.data], end - rest.size)
            if not count:
                raise PipelineError(f"{self.file} became shorter while it was read. Copy it again.")
            rest = rest[count:]
        return data

    def pieces(self) -> Iterator[memoryview]:
        """Yield the raw bytes in pieces of at most 1 MB."""
        starts = range(0, self.nbytes, PIECE_BYTES)
        return (self.read(start, min(PIECE_BYTES, self.nbytes - start)).data for start in starts)

    def digest(self) -> str:
        """Return the tensor's digest (`hash_tensor`).

        Raises:
            PipelineError: a value is NaN or infinite.
        """
        return digest_tensor(self.dtype, self.shape, self.pieces(), f"{self.file}: {self.key}")


@dataclass
class Checkpoint:
    """A folder with config.json and safetensors weights. Open it with `Checkpoint.open(folder)`."""

    folder: Path
    config: dict[str, Any]
    infos: dict[str, TensorInfo]

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read the headers of a checkpoint: model.safetensors, or shards with an index.

        Raises:
            PipelineError: the folder, the config or a shard is missing, a file is broken or not
                safetensors, or a stored head contradicts tie_word_embeddings.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise PipelineError(f"{folder} is not a folder. Give the folder of a checkpoint.")
        files = weight_files(folder)
        if not (folder / "config.json").is_file():
            raise PipelineError(f"{folder} has no config.json. Copy the whole checkpoint.")
        checkpoint = cls(folder, read_json(folder / "config.json"), _read_tensors(folder, files))
        checkpoint._settle_head()
        return checkpoint

    @property
    def model(self) -> Checkpoint:
        """The whole model: this checkpoint, or an adapter's base."""
        return self

    @cached_property
    def state(self) -> str:
        """The folder with size and time of its weight files, which identify their content."""
        streams = {info.file: info.stream for info in self.infos.values()}
        files = []
        for file, stream in sorted(streams.items()):
            stat = os.fstat(stream.fileno())
            files.append((str(file), stat.st_size, stat.st_mtime_ns))
        return f"{self.folder} {files}"

    @property
    def later_heads(self) -> bool:
        """True if the files hold a head of later tokens (mtp.*), which no merge has."""
        headers = map(read_header, weight_files(self.model.folder))
        return any(map(is_later_head, chain.from_iterable(headers)))

    @property
    def names(self) -> list[str]:
        """The sorted names of the stored tensors. A tied head is the embedding and has no name."""
        return sorted(self.infos)

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape, file and offset of a tensor."""
        return self.infos[name]

    def stored(self, name: str) -> TensorInfo | None:
        """Return where the tensor's bytes are stored, or None if the model computes it."""
        return self.info(name)

    def stored_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows of a tensor seen as a matrix (`arrays.matrix`) in its own dtype.

        The array is new. Only these rows are read, and threads may read at once.

        Args:
            name: the tensor.
            start: the first row.
            stop: the row after the last.

        Returns:
            An array of shape (stop - start, columns).
        """
        from pipeline.models.arrays import STORED, matrix

        info = self.info(name)
        _, columns = matrix(info.shape)
        row_bytes = columns * ITEM_BYTES[info.dtype]
        stored = info.read(start * row_bytes, (stop - start) * row_bytes)
        return stored.view(STORED[info.dtype]).reshape(stop - start, columns)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return the rows as float32."""
        return self.stored_rows(name, start, stop).astype("f4", copy=False)

    @property
    def embedding(self) -> str | None:
        """The name of the matrix of the tokens' embeddings."""
        return next(filter(is_embedding, self.infos), None)

    def written_name(self, name: str) -> str:
        """Return the name under which a merge with this checkpoint's layout stores a tensor."""
        return unwrapped(self.info(name).key)

    @property
    def files(self) -> dict[Path, list[str]]:
        """The weight files, sorted, each with its tensors in stored order."""

        def place(item: tuple[str, TensorInfo]) -> tuple[Path, int]:
            return item[1].file, item[1].offset

        layout: dict[Path, list[str]] = {}
        for name, info in sorted(self.infos.items(), key=place):
            layout.setdefault(info.file, []).append(name)
        return layout

    @property
    def tied_head(self) -> bool:
        """True if the output head is the embedding, by config.json or the default of its class."""
        config = text_settings(self.config)
        default = config.get("model_type") in TIED_BY_CLASS or HEAD not in self.infos
        of_decoder = config.get("tie_word_embeddings", default)
        return bool(self.config.get("tie_word_embeddings", of_decoder))

    def _settle_head(self) -> None:
        """Keep only the embedding of a tied pair, so that no tensor counts twice."""
        embedding, head = self.embedding, self.infos.get(HEAD)
        if not self.tied_head:
            if embedding and not head:
                raise PipelineError(
                    f"{self.folder} has no {HEAD}, but tie_word_embeddings is false. Copy it again."
                )
            return
        if head is None:
            return
        if embedding is None:
            embedding = embedding_beside(self.infos, self.config.get("model_type", ""))
            self.infos[embedding] = head
        elif self.infos[embedding].digest() != head.digest():
            raise PipelineError(
                f"{self.folder} stores a {HEAD} that differs from {embedding}, but the head is"
                " tied. Set tie_word_embeddings to false in its config.json, or remove the head."
            )
        del self.infos[HEAD]


def text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's settings in a config.json, also of a model that also sees or hears."""
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        return dict(inner)
    return dict(config)


def with_values(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with other values of these keys, where it or its decoder sets them."""
    changed = dict(config)
    inner = config.get("text_config")
    if isinstance(inner, dict):
        changed["text_config"] = with_values(inner, values)
    for key, value in values.items():
        if changed.get(key):
            changed[key] = value
    return changed


def is_adapter(folder: Path) -> bool:
    """Return True if a folder holds an adapter.

    Raises:
        PipelineError: it also holds a whole model.
    """
    whole = [name for name in (SINGLE, INDEX) if (folder / name).is_file()]
    adapter = [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if (folder / name).is_file()]
    if whole and adapter:
        raise PipelineError(
            f"{folder} holds two models, {whole[0]} and {adapter[0]}. Move one of them to another"
            " folder."
        )
    return ADAPTER_CONFIG in adapter


def refuse_pickles(folder: Path) -> None:
    """Raise PipelineError for a folder of pickled weights."""
    pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pt*")])
    if pickled:
        raise PipelineError(
            f"{folder} holds pickled weights ({pickled[0].name}), but only safetensors are read. If"
            " you trust the file, convert it with"
            " AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)."
        )


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint.

    Raises:
        PipelineError: there are none, or a shard is missing.
    """
    if is_adapter(folder) or (folder / ADAPTER_WEIGHTS).is_file():
        raise PipelineError(
            f"{folder} holds a LoRA adapter, not a whole model. Merge it into its base first."
        )
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        refuse_pickles(folder)
        raise PipelineError(f"{folder} has no {SINGLE} and no {INDEX}. Copy the whole checkpoint.")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise PipelineError(f"{index} has no weight_map of tensors to files. Copy it again.")
    shards = sorted(set(places.values()))
    for shard in shards:
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise PipelineError(
                f"{index} names the shard {shard!r}, which is not in the folder. Copy it again."
            )
    return [folder / shard for shard in shards]


def _read_tensors(folder: Path, files: list[Path]) -> dict[str, TensorInfo]:
    """Return the tensors of a model's files by their one name (models/names.py)."""
    stored: dict[str, TensorInfo] = {}
    for file in files:
        for key, info in read_header(file).items():
            if key in stored:
                raise PipelineError(
                    f"{folder} stores {key} twice, in {stored[key].file.name} and {file.name}."
                    " Remove one."
                )
            stored[key] = info
    infos: dict[str, TensorInfo] = {}
    for key, name in tensor_names(stored).items():
        if name in infos:
            raise PipelineError(
                f"{folder} stores {name} twice, as {infos[name].key} and as {key}. Remove one."
            )
        infos[name] = stored[key]
    if not infos:
        raise PipelineError(f"{folder} holds no tensors. Copy the model again.")
    return infos


def check_headers(folder: Path) -> None:
    """Raise PipelineError if a weight file is truncated or missing, or has a broken header."""
    if (folder / ADAPTER_WEIGHTS).is_file():
        read_header(folder / ADAPTER_WEIGHTS)
    else:
        _read_tensors(folder, weight_files(folder))


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        PipelineError: it is not a JSON object, or a setting has an unexpected type.
    """
    refuse_special(path)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # RecursionError: deeply nested brackets
        raise PipelineError(f"{path} is not valid JSON ({error}). Copy it again.") from error
    if not isinstance(value, dict):
        raise PipelineError(
            f"{path} holds a JSON {type(value).__name__}, not an object. Copy it again."
        )
    check_settings(path, value)
    return value


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file.

    Raises:
        PipelineError: safetensors cannot read the file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        safe_open(file, "np")
    except SafetensorError as error:
        raise PipelineError(
            f"{file} is truncated or has a broken safetensors header ({error}). Copy it again."
        ) from error
    stream = open(file, "rb", buffering=0)  # noqa: SIM115 - closed with the last tensor
    length = int.from_bytes(stream.read(8), "little")
    header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    infos = {}
    for name, entry in header.items():
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        offset = 8 + length + begin
        infos[name] = TensorInfo(entry["dtype"], shape, end - begin, file, offset, name, stream)
    return infos


def header_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Return the start of a safetensors file with these tensors (dtype, shape)."""
    # transformers refuses files without metadata
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data for mapped reads
    return struct.pack("<Q", len(text)) + text


def hash_tensor(
    dtype: str, shape: tuple[int, ...], pieces: Iterable[memoryview]
) -> tuple[str, bool]:
    """Return `blake3:...` over bytes, dtype and shape, and True if all values are finite."""
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
    """Return the digest of a tensor (`hash_tensor`).

    Args:
        dtype: the safetensors dtype.
        shape: the shape.
        pieces: the bytes.
        label: names the tensor in the message.

    Raises:
        PipelineError: a value is NaN or infinite.
    """
    value, finite = hash_tensor(dtype, shape, pieces)
    if not finite:
        raise PipelineError(
            f"{label} holds NaN or infinite values. Train it again or choose another model."
        )
    return value


def digest_tensors(folder: Path) -> dict[str, str]:
    """Return the digest of every tensor of a checkpoint or an adapter by name.

    Raises:
        PipelineError: a value is NaN or infinite.
    """
    adapter = folder / ADAPTER_WEIGHTS
    if adapter.is_file():
        infos = read_header(adapter)
    else:
        infos = Checkpoint.open(folder).infos
    return {name: info.digest() for name, info in sorted(infos.items())}


def weights_root(digests: Mapping[str, str]) -> str:
    """Return `blake3:...` over the sorted names and digests of a checkpoint, however sharded."""
    whole = blake3()
    for name, digest in sorted(digests.items()):
        whole.update(f"{name} {digest}\n".encode())
    return f"{KIND}:{whole.hexdigest()}"
