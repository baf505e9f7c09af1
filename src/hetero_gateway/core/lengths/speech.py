"""The playing time of a recording, from its container's headers, in seconds; nothing is decoded.

An engine's work for speech depends on seconds, and a file's size says little about them: a second
of WAV has as many bytes as ten of MP3. Supported are RIFF WAVE, FLAC, Ogg (Opus, Vorbis), MPEG
audio and MP4 (M4A), which covers what is uploaded for transcription except WebM; that, and
unreadable files, are estimated by their bytes. Files with honest headers are within 1 %; others are
limited to what their bytes can hold.
"""

from __future__ import annotations

import struct

# Of speech at 32 kbit/s, which is what phones and browsers record.
_USUAL_BYTES_PER_S = 4000.0
# The most bytes that a compressed second has (Opus' and AAC's limits, 512 kbit/s), and the fewest
# (Codec2 and AMR are not read; Opus begins at 6 kbit/s).
_MOST_BYTES_PER_S = 64_000.0
_LEAST_BYTES_PER_S = 700.0
# A header is looked for only within this many bytes of either end of the file.
_NEAR_BYTES = 1 << 16
_FAR_BYTES = 1 << 22
_OPUS_HZ = 48_000

# kbit/s by index: MPEG 1 and MPEG 2, layers III, II and I.
_KBITS = {
    (1, 3): (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (1, 2): (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (1, 1): (0, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (2, 3): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (2, 2): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (2, 1): (0, 32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
}
_HZ = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}


def seconds_of(data: bytes | bytearray, start: int, end: int) -> float:
    """The seconds of the file between two places of a body; 0 for an empty one."""
    size = end - start
    if size <= 0:
        return 0.0
    try:
        if data.startswith(b"RIFF", start):
            said = _wave(data, start, end)
            if said is not None:
                return said
        seconds = _compressed(data, start, end)
    except struct.error:  # truncated within a header
        seconds = None
    if seconds is None:
        seconds = size / _USUAL_BYTES_PER_S
    return min(max(seconds, size / _MOST_BYTES_PER_S), size / _LEAST_BYTES_PER_S)


def _compressed(data: bytes | bytearray, start: int, end: int) -> float | None:
    if data.startswith(b"fLaC", start):
        return _flac(data, start)
    if data.startswith(b"OggS", start):
        return _ogg(data, start, end)
    if data.startswith(b"ftyp", start + 4):
        return _mp4(data, start, end)
    return _mpeg(data, start, end)


def _wave(data: bytes | bytearray, start: int, end: int) -> float | None:
    """By the samples that are there, whatever number the header states."""
    at, frame_bytes_per_s = start + 12, 0.0
    for _ in range(64):
        kind = data[at : at + 4]
        (size,) = struct.unpack_from("<I", data, at + 4)
        if kind == b"fmt ":
            channels, hz, _, _, bits = struct.unpack_from("<HIIHH", data, at + 10)
            frame_bytes_per_s = channels * hz * bits / 8
        elif kind == b"data":
            # Compressed in a WAVE (0 bits), or nonsense.
            return (end - at - 8) / frame_bytes_per_s if frame_bytes_per_s >= 1 else None
        at += 8 + size + size % 2
        if at >= end:
            break
    return None


def _flac(data: bytes | bytearray, start: int) -> float | None:
    packed = int.from_bytes(data[start + 18 : start + 26], "big")
    hz, samples = packed >> 44, packed & (1 << 36) - 1
    return samples / hz if hz and samples else None


def _ogg(data: bytes | bytearray, start: int, end: int) -> float | None:
    page = data.rfind(b"OggS", max(start, end - _NEAR_BYTES), end)
    if page < 0:
        return None
    (samples,) = struct.unpack_from("<q", data, page + 6)
    head = data[start : start + 128]
    vorbis = head.find(b"\x01vorbis")
    if vorbis >= 0:
        (hz,) = struct.unpack_from("<I", head, vorbis + 12)
    else:
        hz = _OPUS_HZ if b"OpusHead" in head else 0
    return samples / hz if hz and samples > 0 else None


def _mp4(data: bytes | bytearray, start: int, end: int) -> float | None:
    at = data.find(b"mvhd", start, min(end, start + _NEAR_BYTES))
    if at < 0:  # the index may follow the samples
        at = data.rfind(b"mvhd", max(start, end - _FAR_BYTES), end)
    if at < 0:
        return None
    layout, place = (">IQ", 24) if data[at + 4] else (">II", 16)
    hz, samples = struct.unpack_from(layout, data, at + place)
    seconds: float = samples / hz if hz else 0.0
    return seconds or None


def _mpeg(data: bytes | bytearray, start: int, end: int) -> float | None:
    if data.startswith(b"ID3", start):
        size = 0
        for byte in data[start + 6 : start + 10]:
            size = size << 7 | byte & 0x7F
        start += 10 + size
    at = data.find(b"\xff", start, min(end, start + 4096))
    while at >= 0:
        frame = _mpeg_frame(data[at : at + 4])
        if frame is not None:
            bits_per_s, hz, samples = frame
            head = data[at : at + 128]
            for mark in (b"Xing", b"Info"):
                place = head.find(mark)
                if place >= 0 and head[place + 7] & 1:  # it states the number of frames
                    frames = int.from_bytes(head[place + 8 : place + 12], "big")
                    return frames * samples / hz
            return (end - at) * 8 / bits_per_s
        at = data.find(b"\xff", at + 1, min(end, start + 4096))
    return None


def _mpeg_frame(head: bytes | bytearray) -> tuple[float, int, int] | None:
    """(bits per second, samples per second, samples in a frame); None: not the start of a frame."""
    if len(head) < 4 or head[1] & 0xE0 != 0xE0:
        return None
    version, layer = head[1] >> 3 & 3, 4 - (head[1] >> 1 & 3)
    rate, hertz = head[2] >> 4, head[2] >> 2 & 3
    if version == 1 or layer == 4 or rate in (0, 15) or hertz == 3:
        return None
    first = version == 3
    samples = 384 if layer == 1 else 1152 if first or layer == 2 else 576
    return _KBITS[1 if first else 2, layer][rate] * 1000.0, _HZ[version][hertz], samples
