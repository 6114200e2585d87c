"""The header of a GGUF file (llama.cpp's format), and the values of its tensors one at a time.

The header is walked here rather than by `gguf.GGUFReader`, which believes every count it reads: an array said to have
2**60 elements keeps it busy for ever. The dequantisation is that of the `gguf` package. Here R stands for the rows of a
tensor, all but its last axis taken together, B for the bytes of a row and D for its values.
"""

import dataclasses
import math
import pathlib
import struct

import jax.numpy as jnp
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from rhyme_jax.errors import InputError

_CHUNK = 2**21  # elements dequantised at once: `gguf` needs a few times their size beside the result
_MAGIC, _VERSIONS, _MAX_DIMS = b"GGUF", (2, 3), 4
_STRING, _ARRAY = 8, 9
# Type number of a metadata value -> numpy dtype.
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
# Tensors that are kept as they are -> numpy dtype. Those of any other type are made float32.
_PLAIN = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.BF16: np.dtype(jnp.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor's bytes lie. `shape` is in numpy's order, slowest axis first."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int  # byte offset in the file
    size: int  # bytes


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """A GGUF file with its header read; every offset has been found to lie inside the file."""

    source: str
    data: np.ndarray  # uint8, all of the file, mapped
    metadata: dict  # scalars as Python values, arrays as numpy arrays or lists of str
    tensors: dict[str, TensorInfo]

    def check_kind(self, name: str) -> None:
        """Raises InputError where the `gguf` package cannot undo a tensor's quantisation."""
        kind = self.tensors[name].kind
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as e:
            raise InputError(f"{self.source}: weight {name} has type {kind.name}, which is not supported") from e

    def values(self, name: str, order: np.ndarray | None = None) -> np.ndarray:
        """A tensor's values: float32, float16 and bfloat16 as they are stored, else float32 as of `gguf.dequantize`.

        Args:
          name: of the tensor.
          order: where each row of the result comes from; None leaves rows where they are. (Quantisation works along
            a row, so that rows change places before it is undone.)

        Raises:
          InputError: its type is not supported, or a value is not finite.
        """
        info = self.tensors[name]
        self.check_kind(name)
        raw_RB = self.data[info.start : info.start + info.size].reshape(math.prod(info.shape[:-1]), -1)
        value_RD = np.empty((len(raw_RB), info.shape[-1]), _PLAIN.get(info.kind, np.float32))
        step = max(1, _CHUNK // info.shape[-1])
        for start in range(0, len(raw_RB), step):
            rows = slice(start, start + step) if order is None else order[start : start + step]
            chunk_RB = np.ascontiguousarray(raw_RB[rows])
            if info.kind in _PLAIN:
                chunk_RD = chunk_RB.view(value_RD.dtype)
            else:
                with np.errstate(all="ignore"):  # what overflows is found below
                    chunk_RD = dequantize(chunk_RB, info.kind)
            if not np.isfinite(chunk_RD).all():
                raise InputError(f"{self.source}: weight {name} holds values that are not finite; the file is damaged")
            value_RD[start : start + step] = chunk_RD
        return value_RD.reshape(info.shape)


class _Cursor:
    """Reads the header front to back and refuses to leave the file."""

    def __init__(self, data: np.ndarray, source: str):
        self.data, self.source, self.at = memoryview(data), source, 0

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.at:
            raise InputError(f"{self.source}: is truncated or damaged: its header runs past the end of the file")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, fmt: str) -> int:
        return struct.unpack(fmt, self.take(struct.calcsize(fmt)))[0]

    def string(self) -> str:
        try:
            return str(self.take(self.number("<Q")), "utf-8")
        except UnicodeDecodeError as e:
            raise InputError(f"{self.source}: is damaged: its header has text that is not UTF-8") from e

    def value(self, kind: int):
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.number("<I"), self.number("<Q"))
        return self.array(kind, 1)[0].item()

    def array(self, kind: int, count: int):
        if kind == _STRING:
            return [self.string() for _ in range(self.bounded(count, 8))]
        if kind not in _SCALARS:  # nor an array of arrays, which no key that we read has
            raise InputError(f"{self.source}: is damaged: its header has a value of unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def bounded(self, count: int, least: int) -> int:
        """`count` things of at least `least` bytes each, if what is left of the file can hold them."""
        if count * least > len(self.data) - self.at:
            raise InputError(f"{self.source}: is truncated or damaged: its header counts more than the file holds")
        return count


def read_header(path: pathlib.Path) -> GgufFile:
    """Metadata and tensor offsets of a GGUF file, version 2 or 3, little-endian.

    Raises:
      InputError: it is not such a file, or anything in it points outside it.
    """
    source = str(path)
    try:
        if path.stat().st_size < 24:
            raise InputError(f"{source}: is not a GGUF file ({path.stat().st_size} bytes)")
        data = np.memmap(path, np.uint8, "r")
    except OSError as e:
        raise InputError(f"{source}: cannot be read ({e.strerror})") from e
    cursor = _Cursor(data, source)
    magic = bytes(cursor.take(4))
    if magic != _MAGIC:
        raise InputError(f"{source}: is not a GGUF file (begins with {magic!r}, expected {_MAGIC!r})")
    version = cursor.number("<I")
    if not version & 0xFFFF and version >> 24 in _VERSIONS:
        raise InputError(f"{source}: is big-endian; only little-endian GGUF files are supported")
    if version not in _VERSIONS:
        raise InputError(f"{source}: has GGUF version {version}; supported: 2, 3")
    tensor_count, key_count = cursor.number("<Q"), cursor.number("<Q")
    metadata = {}
    for _ in range(cursor.bounded(key_count, 13)):
        key = cursor.string()
        if key in metadata:
            raise InputError(f"{source}: is damaged: key {key[:200]!r} comes twice")
        metadata[key] = cursor.value(cursor.number("<I"))
    raw = [_tensor_info(cursor) for _ in range(cursor.bounded(tensor_count, 24))]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise InputError(f"{source}: general.alignment={repr(alignment)[:80]}: must be a positive integer")
    base = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, info in raw:
        start = base + info.start
        if name in tensors:
            raise InputError(f"{source}: is damaged: weight {name[:200]!r} comes twice")
        if start + info.size > len(data):
            raise InputError(
                f"{source}: is truncated: weight {name[:200]} ends at byte {start + info.size} of {len(data)}"
            )
        tensors[name] = dataclasses.replace(info, start=start)
    return GgufFile(source, data, metadata, tensors)


def _tensor_info(cursor: _Cursor) -> tuple[str, TensorInfo]:
    """A tensor's name and place; `start` is still relative to the data section."""
    name, dims = cursor.string(), cursor.number("<I")
    if not 1 <= dims <= _MAX_DIMS:
        raise InputError(f"{cursor.source}: is damaged: weight {name[:200]!r} has {dims} dimensions")
    shape = tuple(int(n) for n in reversed(cursor.array(10, dims)))
    kind, start = cursor.number("<I"), cursor.number("<Q")
    try:
        kind = GGMLQuantizationType(kind)
    except ValueError as e:
        raise InputError(f"{cursor.source}: weight {name[:200]!r} has unknown type {kind}") from e
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % block:
        raise InputError(f"{cursor.source}: is damaged: weight {name[:200]!r} has shape {shape} and type {kind.name}")
    return name, TensorInfo(shape, kind, start, math.prod(shape) // block * block_bytes)
