"""The C ABI: constants, structs and signatures of include/video_vae.h, under the names they have there.

The only place that knows layouts. tests/test_abi.py compares it with what a C compiler makes of the header.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char, c_char_p, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p

VVAE_ABI_MAJOR = 2
VVAE_ABI_MINOR = 1
VVAE_ABI_VERSION = VVAE_ABI_MAJOR << 16 | VVAE_ABI_MINOR

VVAE_OK = 0
VVAE_AGAIN = 1
VVAE_END = 2
VVAE_ERROR_ARGUMENT = -1
VVAE_ERROR_TENSOR = -2
VVAE_ERROR_CHECKPOINT = -3
VVAE_ERROR_DEVICE = -4
VVAE_ERROR_MEMORY = -5
VVAE_ERROR_CANCELLED = -6
VVAE_ERROR_STATE = -7
VVAE_ERROR_INTERNAL = -8

VVAE_DEVICE_CPU = 1
VVAE_DEVICE_CUDA = 2
VVAE_DEVICE_CUDA_HOST = 3
VVAE_DEVICE_VULKAN = 7

VVAE_DTYPE_U8 = 1 | 8 << 8 | 1 << 16
VVAE_DTYPE_U16 = 1 | 16 << 8 | 1 << 16
VVAE_DTYPE_F16 = 2 | 16 << 8 | 1 << 16
VVAE_DTYPE_BF16 = 4 | 16 << 8 | 1 << 16
VVAE_DTYPE_F32 = 2 | 32 << 8 | 1 << 16

VVAE_LOG_DEBUG = 0
VVAE_LOG_INFO = 1
VVAE_LOG_WARNING = 2
VVAE_LOG_ERROR = 3

VVAE_RUN_HAS_STREAM = 1

VVAE_TRIM_WORKSPACE = 1
VVAE_TRIM_WEIGHTS = 2

VVAE_PORT_INPUT = 0
VVAE_PORT_OUTPUT = 1

VVAE_PARAM_INT = 0
VVAE_PARAM_FLOAT = 1
VVAE_PARAM_BOOL = 2
VVAE_PARAM_CHOICE = 3
VVAE_PARAM_BYTES = 4
VVAE_PARAM_TEXT = 5
VVAE_PARAM_HAS_AUTO = 1
VVAE_PARAM_HAS_RANGE = 2

# Users' pointers are read as numbers (c_void_p), texts as bytes.
vvae_log_fn = ctypes.CFUNCTYPE(None, c_void_p, c_int32, c_char_p)
vvae_alloc_fn = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_uint64, c_uint64)
vvae_free_fn = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_uint64)
vvae_device_alloc_fn = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_int32, c_uint64)
vvae_device_free_fn = ctypes.CFUNCTYPE(None, c_void_p, c_int32, c_void_p, c_uint64)
vvae_progress_fn = ctypes.CFUNCTYPE(c_int32, c_void_p, c_uint64, c_uint64, c_char_p)

Five = c_int64 * 5


class vvae_create_info(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("abi_version", c_uint32),
        ("weights", c_char_p),
        ("device", c_char_p),
        ("log", vvae_log_fn),
        ("log_user", c_void_p),
        ("alloc", vvae_alloc_fn),
        ("free", vvae_free_fn),
        ("alloc_user", c_void_p),
        ("device_alloc", vvae_device_alloc_fn),
        ("device_free", vvae_device_free_fn),
        ("device_alloc_user", c_void_p),
        ("progress", vvae_progress_fn),
        ("progress_user", c_void_p),
    ]


class vvae_model_desc(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("pixel_channels", c_uint32),
        ("latent_channels", c_uint32),
        ("spatial_scale", c_uint32),
        ("time_scale", c_uint32),
        ("decoded_channels", c_uint32),
        ("packing", c_uint32),
        ("packed_channels", c_uint32),
        ("latents_known", c_uint32),
        ("statistics_count", c_uint32),
        ("family", c_char * 20),
        ("latent_format", c_char * 20),
        ("latent_formats", c_char * 64),
        ("latent_scale", c_double),
        ("latent_shift", c_double),
        ("latent_means", POINTER(c_double)),
        ("latent_deviations", POINTER(c_double)),
    ]


class vvae_memory_info(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("streams", c_uint32),
        ("now", c_uint64),
        ("peak", c_uint64),
        ("reserved", c_uint64),
        ("host", c_uint64),
    ]


class vvae_handle_device_info(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("device_count", c_uint32),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("id", c_char * 20),
        ("unused", c_uint32),
        ("now", c_uint64),
        ("peak", c_uint64),
        ("reserved", c_uint64),
        ("host", c_uint64),
        ("device_bytes", c_uint64),
        ("host_bytes", c_uint64),
        ("first_clip", c_int64),
        ("first_frame", c_int64),
        ("frames", c_int64),
        ("seconds", c_double),
        ("measured_seconds", c_double),
    ]


class vvae_tensor(Structure):
    """The layout of DLPack's DLTensor too, which is how _arrays.py reads DLPack capsules."""

    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("dtype", c_uint32),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class vvae_run_info(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("cuda_stream", c_void_p),
        ("progress", vvae_progress_fn),
        ("progress_user", c_void_p),
        ("logvar", POINTER(vvae_tensor)),
    ]


class vvae_plan_info(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("exact", c_uint32),
        ("device_bytes", c_uint64),
        ("host_bytes", c_uint64),
        ("weight_bytes", c_uint64),
        ("workspace_bytes", c_uint64),
        ("input_shape", Five),
        ("output_shape", Five),
        ("slice_frames", c_int64),
        ("chunk_frames", c_int64 * 8),
        ("chunk_count", c_int64),
        ("tile_rows", c_int64),
        ("tile_columns", c_int64),
        ("tile_height", c_int64),
        ("tile_width", c_int64),
        ("tile_overlap", c_int64),
        ("text_length", c_uint64),
        ("offloaded_frame_bytes", c_uint64),
        ("moved_bytes_per_frame", c_uint64),
        ("seconds", c_double),
        ("offloaded_weight_bytes", c_uint64),
    ]


class vvae_run_report(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("exact", c_uint32),
        ("node", c_char_p),
        ("seconds", c_double),
        ("estimated_seconds", c_double),
        ("device_bytes", c_uint64),
        ("host_bytes", c_uint64),
        ("slice_frames", c_int64),
        ("tile_rows", c_int64),
        ("tile_columns", c_int64),
        ("text_length", c_uint64),
    ]


class vvae_device_desc(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("id", c_char * 20),
        ("name", c_char * 128),
        ("memory_total", c_uint64),
        ("memory_free", c_uint64),
        ("uuid", c_char * 48),
        ("compute_major", c_uint32),
        ("compute_minor", c_uint32),
    ]


class vvae_node_desc(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("id", c_char_p),
        ("label", c_char_p),
        ("help", c_char_p),
    ]


class vvae_port_desc(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("direction", c_uint32),
        ("optional", c_uint32),
        ("dtype_count", c_uint32),
        ("dtypes", POINTER(c_uint32)),
        ("name", c_char_p),
        ("kind", c_char_p),
        ("help", c_char_p),
    ]


class vvae_param_desc(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("kind", c_uint32),
        ("flags", c_uint32),
        ("choice_count", c_uint32),
        ("key", c_char_p),
        ("default_value", c_char_p),
        ("unit", c_char_p),
        ("help", c_char_p),
        ("min", c_double),
        ("max", c_double),
        ("step", c_double),
    ]


STRUCTS = [
    vvae_create_info,
    vvae_model_desc,
    vvae_memory_info,
    vvae_handle_device_info,
    vvae_tensor,
    vvae_run_info,
    vvae_plan_info,
    vvae_run_report,
    vvae_device_desc,
    vvae_node_desc,
    vvae_port_desc,
    vvae_param_desc,
]

# Handles and streams are numbers in a pointer's place.
_handle = c_void_p
_tensor = POINTER(vvae_tensor)
_run = POINTER(vvae_run_info)
_count = POINTER(c_int64)

# name: (result, arguments)
SIGNATURES: dict[str, tuple] = {
    "vvae_create": (c_int32, [POINTER(vvae_create_info), POINTER(_handle)]),
    "vvae_configure": (c_int32, [_handle, c_char_p, c_char_p]),
    "vvae_free": (c_int32, [_handle]),
    "vvae_model_info": (c_int32, [_handle, POINTER(vvae_model_desc)]),
    "vvae_cancel": (c_int32, [_handle]),
    "vvae_error": (c_int64, [_handle, c_char_p, c_uint64]),
    "vvae_memory": (c_int32, [_handle, POINTER(vvae_memory_info)]),
    "vvae_handle_device": (c_int32, [_handle, c_uint32, POINTER(vvae_handle_device_info)]),
    "vvae_trim": (c_int32, [_handle, c_uint32]),
    "vvae_encode": (c_int32, [_handle, _tensor, _tensor, _run]),
    "vvae_decode": (c_int32, [_handle, _tensor, _tensor, _run]),
    "vvae_plan": (c_int32, [_handle, c_char_p, _count, POINTER(vvae_plan_info), c_char_p, c_uint64]),
    "vvae_range_inputs": (c_int32, [_handle, c_char_p, c_int64, c_int64, c_int64, _count, _count]),
    "vvae_encode_range": (c_int32, [_handle, _tensor, c_int64, c_int64, _tensor, _run]),
    "vvae_decode_range": (c_int32, [_handle, _tensor, c_int64, c_int64, _tensor, _run]),
    "vvae_plan_range": (
        c_int32,
        [_handle, c_char_p, _count, c_int64, c_int64, POINTER(vvae_plan_info), c_char_p, c_uint64],
    ),
    "vvae_plan_timeline": (
        c_int32,
        [_handle, c_char_p, _count, c_char_p, c_uint64, POINTER(c_uint64)],
    ),
    "vvae_last_run": (c_int32, [_handle, POINTER(vvae_run_report), c_char_p, c_uint64]),
    "vvae_stream_open": (c_int32, [_handle, c_char_p, _count, POINTER(_handle)]),
    "vvae_stream_open_at": (c_int32, [_handle, c_char_p, _count, c_int64, POINTER(_handle)]),
    "vvae_stream_push": (c_int32, [_handle, _tensor, _count]),
    "vvae_stream_pull": (c_int32, [_handle, _tensor, _run, _count]),
    "vvae_stream_close": (c_int32, [_handle]),
    "vvae_abi_version": (c_uint32, []),
    "vvae_version": (c_char_p, []),
    "vvae_device_count": (c_uint32, []),
    "vvae_device_info": (c_int32, [c_uint32, POINTER(vvae_device_desc)]),
    "vvae_node_count": (c_uint32, []),
    "vvae_node_info": (c_int32, [c_uint32, POINTER(vvae_node_desc)]),
    "vvae_port_count": (c_uint32, [c_uint32]),
    "vvae_port_info": (c_int32, [c_uint32, c_uint32, POINTER(vvae_port_desc)]),
    "vvae_param_count": (c_uint32, [c_uint32]),
    "vvae_param_info": (c_int32, [c_uint32, c_uint32, POINTER(vvae_param_desc)]),
    "vvae_choice_count": (c_uint32, [c_uint32, c_uint32]),
    "vvae_choice": (c_char_p, [c_uint32, c_uint32, c_uint32]),
}


def sized(struct: type) -> Structure:
    """An empty struct with its size set, as the library wants every struct."""
    return struct(ctypes.sizeof(struct))
