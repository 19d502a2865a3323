"""A checkpoint on disk as a table of named tensors, opened by its headers alone.

Reads the safetensors layout itself (8 bytes little-endian header length, a JSON header, then raw bytes), so
that shapes, dtypes and mistakes are known in milliseconds, before torch is imported. Never reads pickles.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from blake3 import blake3

from pipeline.errors import PipelineError
from pipeline.models.files import ADAPTER_WEIGHTS

if TYPE_CHECKING:
    import numpy as np
    import torch

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # torch's name -> safetensors' name
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_EXPONENT = {  # item type and the bits that are all ones in infinities and NaNs
    "F64": ("<u8", 0x7FF0000000000000),
    "F32": ("<u4", 0x7F800000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
PIECE_BYTES = 2**20  # stays in the cache; a multiple of every item size: no value is cut in two
KIND = "blake3"  # what digests begin with; those of the first versions begin with sha256 and are never compared
_TIED_BY_CLASS = ("cohere", "cohere2")  # CohereConfig ties by default; Aya's config.json does not say so


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype such as BF16."""
    import torch

    return {short: getattr(torch, long) for long, short in DTYPES.items()}[dtype]


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: safetensors dtype (F32, BF16, ...), shape, and where its bytes lie in which file."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int  # bytes from the start of the file

    def pieces(self) -> Iterator[memoryview]:
        """The raw bytes in pieces of at most 1 MB; a piece is valid until the next one is requested."""
        buffer = memoryview(bytearray(min(PIECE_BYTES, self.nbytes)))
        remaining = self.nbytes
        with open(self.file, "rb") as stream:
            stream.seek(self.offset)
            while remaining:
                piece = buffer[: min(remaining, len(buffer))]
                if stream.readinto(piece) != len(piece):
                    raise PipelineError(f"{self.file} became shorter while it was read: copy it again")
                yield piece
                remaining -= len(piece)


@dataclass
class Checkpoint:
    """A folder with config.json and safetensors weights. Open it with `Checkpoint.open(folder)`."""

    folder: Path
    config: dict[str, Any]
    infos: dict[str, TensorInfo]
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict, repr=False)
    _streams: dict[Path, BinaryIO] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read the headers of a checkpoint: one model.safetensors, or shards with an index.

        Raises PipelineError for a missing folder, config or shard, for weights that are not safetensors, for
        a broken or truncated file, and for a head that contradicts tie_word_embeddings.
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
    def names(self) -> list[str]:
        """The names of the stored tensors, sorted; a tied head is the embedding and has none of its own."""
        return sorted(self.infos)

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape, file and offset of one tensor."""
        if name not in self.infos:
            raise PipelineError(f"{self.folder} has no tensor {name!r}")
        return self.infos[name]

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, mapped from the file: only what is read is loaded.

        The mapping is copy-on-write, so writing to the tensor never changes the file.
        """
        import torch

        info = self.info(name)
        if info.dtype not in DTYPES.values():
            raise PipelineError(f"{self.folder}: {name} is {info.dtype}, not one of {', '.join(DTYPES)}")
        if not info.nbytes:
            return torch.empty(info.shape, dtype=torch_dtype(info.dtype))
        if info.file not in self._maps:
            with open(info.file, "rb") as stream:
                self._maps[info.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        count, data = math.prod(info.shape), self._maps[info.file]
        flat = torch.frombuffer(data, dtype=torch_dtype(info.dtype), count=count, offset=info.offset)
        return flat.view(info.shape)

    def stored(self, name: str) -> TensorInfo | None:
        """Where the tensor's bytes are stored; None for a composed model whose tensor is stored nowhere."""
        return self.info(name)

    def rows(self, name: str, start: int, stop: int, out: np.ndarray) -> None:
        """Rows of a tensor seen as a matrix (`floats.matrix`) as float32 into `out`, (stop - start, columns).

        Read, not mapped: threads may read at once, and memory stays that of `out`.
        """
        from pipeline.models.floats import STORED, buffers, widen

        info = self.info(name)
        if info.dtype not in DTYPES.values():
            raise PipelineError(f"{self.folder}: {name} is {info.dtype}, not one of {', '.join(DTYPES)}")
        into = out if info.dtype == "F32" else buffers("stored", out.shape, STORED[info.dtype])
        self.read(info, start * out.shape[1] * into.itemsize, into)
        if into is not out:
            widen(into, info.dtype, out)

    def read(self, info: TensorInfo, offset: int, into: np.ndarray) -> None:
        """Read bytes of a tensor from `offset` on into the contiguous array `into`, filling it."""
        stream = self._streams.get(info.file)
        if stream is None:  # setdefault: where two threads come at once, both take the same one
            stream = self._streams.setdefault(info.file, open(info.file, "rb", buffering=0))  # noqa: SIM115
        remaining, position = into.reshape(-1).view("u1").data, info.offset + offset
        while remaining:
            count = os.preadv(stream.fileno(), [remaining], position)
            if not count:
                raise PipelineError(f"{info.file} became shorter while it was read: copy it again")
            remaining, position = remaining[count:], position + count

    @property
    def files(self) -> dict[Path, list[str]]:
        """The weight files, by name, each with its tensors in stored order."""
        layout: dict[Path, list[str]] = {}
        for name, info in sorted(self.infos.items(), key=lambda item: (item[1].file, item[1].offset)):
            layout.setdefault(info.file, []).append(name)
        return layout

    @property
    def tied_head(self) -> bool:
        """Whether the output head is the embedding matrix: from config.json, else the class's own default."""
        default = self.config.get("model_type") in _TIED_BY_CLASS or HEAD not in self.infos
        return bool(self.config.get("tie_word_embeddings", default))

    @property
    def architecture(self) -> str:
        """The model class, such as LlamaForCausalLM, or the model type where config.json names no class."""
        return str((self.config.get("architectures") or [self.config.get("model_type", "unknown")])[0])

    def _settle_head(self) -> None:
        """Drop a stored copy of a tied head, so that no tensor is merged or counted twice."""
        if not self.tied_head and EMBEDDING in self.infos and HEAD not in self.infos:
            raise PipelineError(f"{self.folder} has no {HEAD} although tie_word_embeddings is false: copy it again")
        if self.tied_head and EMBEDDING in self.infos and HEAD in self.infos:
            embedding, head = self.infos[EMBEDDING], self.infos[HEAD]
            same = (embedding.dtype, embedding.shape) == (head.dtype, head.shape)
            if not same or any(a != b for a, b in zip(embedding.pieces(), head.pieces(), strict=True)):
                raise PipelineError(
                    f"{self.folder} stores a {HEAD} that differs from {EMBEDDING} although the head is tied: "
                    "set tie_word_embeddings to false in its config.json, or remove the head"
                )
            del self.infos[HEAD]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises PipelineError where there are none, or a shard is missing."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        if any(folder.glob(f"{Path(ADAPTER_WEIGHTS).stem}.*")):
            raise PipelineError(f"{folder} holds a LoRA adapter, not a whole model: merge it into its base first")
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
            raise PipelineError(f"{folder} holds pickled weights; only safetensors are read: convert it first")
        raise PipelineError(f"{folder} has no model.safetensors and no model.safetensors.index.json")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise PipelineError(f"{index} has no weight_map of tensors to files: copy it again")
    shards = sorted(set(places.values()))
    for shard in shards:
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise PipelineError(f"{index} names the shard {shard!r}, which is not in the folder: copy it again")
    return [folder / shard for shard in shards]


def _read_tensors(folder: Path, files: list[Path]) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(file).items():
            if name in infos:
                raise PipelineError(f"{folder} stores {name} twice, in {infos[name].file.name} and {file.name}")
            infos[name] = info
    index = folder / "model.safetensors.index.json"
    if files and files[0].name != "model.safetensors":
        for name, shard in read_json(index)["weight_map"].items():
            if name not in infos or infos[name].file.name != shard:
                raise PipelineError(f"{index} places {name} in {shard}, which does not hold it")
    if not infos:
        raise PipelineError(f"{folder} holds no tensors")
    return infos


def check_headers(folder: Path) -> None:
    """Raise PipelineError where a file of weights is truncated, a shard is missing, or a header is broken."""
    if (folder / ADAPTER_WEIGHTS).is_file():
        read_header(folder / ADAPTER_WEIGHTS)
    else:
        _read_tensors(folder, weight_files(folder))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises PipelineError if it is not one."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # the latter of brackets in brackets
        raise PipelineError(f"{path} is not valid JSON ({error}): copy it again") from error
    if not isinstance(value, dict):
        raise PipelineError(f"{path} holds a JSON {type(value).__name__}, not an object: copy it again")
    return value


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file. Raises PipelineError where header and file size disagree."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise PipelineError(f"{file} is truncated or not a safetensors file: copy it again")
        header = stream.read(length)
    infos: dict[str, TensorInfo] = {}
    try:
        for name, entry in json.loads(header).items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            shape, dtype = tuple(entry["shape"]), str(entry["dtype"])
            if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
                raise ValueError(f"{name} has shape {entry['shape']} at {entry['data_offsets']}")
            infos[name] = TensorInfo(dtype, shape, end - begin, file, 8 + length + begin)
            if dtype in _ITEM_BYTES and math.prod(shape) * _ITEM_BYTES[dtype] != end - begin:
                raise ValueError(f"{name} has {end - begin} bytes")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PipelineError(f"{file} has a broken safetensors header ({error}): copy it again") from error
    position = 8 + length
    for info in sorted(infos.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != position:
            raise PipelineError(f"{file} has a broken safetensors header (gap or overlap): copy it again")
        position += info.nbytes
    if position != size:
        raise PipelineError(f"{file} has {size} bytes where its header promises {position}: it is truncated")
    return infos


def header_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """The start of a safetensors file holding these (dtype, shape), in this order; their bytes follow it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * _ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the data aligned for mapped reads
    return struct.pack("<Q", len(text)) + text


def hash_tensor(dtype: str, shape: tuple[int, ...], pieces: Iterable[memoryview]) -> tuple[str, bool]:
    """`blake3:...` over bytes, dtype and shape of a tensor, and whether all values are finite: one read serves both."""
    import numpy

    item, all_ones = _EXPONENT.get(dtype, ("u1", None))
    result, finite = blake3(), True
    for piece in pieces:
        result.update(piece)
        if all_ones is not None and finite:  # NaN and infinities are the largest of each sign, as integers
            positive = numpy.frombuffer(piece, item.replace("u", "i")).max(initial=0)
            either = numpy.frombuffer(piece, item).max(initial=0)
            finite = positive < all_ones and either < all_ones | 1 << 8 * either.itemsize - 1
    result.update(f"{dtype} {list(shape)}\n".encode())
    return f"{KIND}:{result.hexdigest()}", bool(finite)


def digest_tensor(dtype: str, shape: tuple[int, ...], pieces: Iterable[memoryview], label: str) -> str:
    """The digest of a tensor, as `hash_tensor` has it. Refuses NaN and infinities, naming `label`."""
    value, finite = hash_tensor(dtype, shape, pieces)
    if not finite:
        raise PipelineError(f"{label} holds NaN or infinite values: train it again or choose another")
    return value


def digest_tensors(folder: str | Path) -> dict[str, str]:
    """The digest of every tensor of a checkpoint, by name. Raises PipelineError for NaN and infinite values."""
    return _digest_names(Checkpoint.open(folder).infos)


def digests_in(file: Path) -> dict[str, str]:
    """The digest of every tensor of one safetensors file, by name. Raises PipelineError for NaN and infinite values."""
    return _digest_names(read_header(file))


def _digest_names(infos: Mapping[str, TensorInfo]) -> dict[str, str]:
    return {
        name: digest_tensor(info.dtype, info.shape, info.pieces(), f"{info.file}: {name}")
        for name, info in sorted(infos.items())
    }


def weights_root(digests: Mapping[str, str]) -> str:
    """One `blake3:...` for a whole checkpoint, whatever its sharding: over its sorted names and digests."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()
    return f"{KIND}:{blake3(lines).hexdigest()}"
