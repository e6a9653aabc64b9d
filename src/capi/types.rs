//! The constants, structs and callbacks of the ABI. This file becomes the upper half of the header; it holds no logic.

#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_void};

/// What vvae_abi_version returns: major << 16 | minor. Another major is incompatible. A newer minor has more functions
/// and longer structs.
pub const VVAE_ABI_MAJOR: u32 = 2;
pub const VVAE_ABI_MINOR: u32 = 1;
pub const VVAE_ABI_VERSION: u32 = (VVAE_ABI_MAJOR << 16) | VVAE_ABI_MINOR;

/// Status. 0 is success, above 0 is flow control, below 0 is a failure. vvae_error gives the text of a failure.
pub const VVAE_OK: i32 = 0;
/// Streams: push, then pull; or pull, then push the rest.
pub const VVAE_AGAIN: i32 = 1;
/// Streams: all frames have been pulled.
pub const VVAE_END: i32 = 2;
/// An argument is null, out of range, or contradicts another one.
pub const VVAE_ERROR_ARGUMENT: i32 = -1;
/// A tensor's shape, strides, type or device do not fit the call.
pub const VVAE_ERROR_TENSOR: i32 = -2;
/// A file cannot be read or written, or is no checkpoint of this model.
pub const VVAE_ERROR_CHECKPOINT: i32 = -3;
/// The device named does not exist or cannot be used.
pub const VVAE_ERROR_DEVICE: i32 = -4;
/// The job does not fit in the limit, or in the memory that is free.
pub const VVAE_ERROR_MEMORY: i32 = -5;
/// The host asked to stop, by vvae_cancel or by its progress callback.
pub const VVAE_ERROR_CANCELLED: i32 = -6;
/// The call came at the wrong time: the handle is busy, closed, or the stream has ended.
pub const VVAE_ERROR_STATE: i32 = -7;
/// A bug in the library. The handle can only be freed.
pub const VVAE_ERROR_INTERNAL: i32 = -8;

/// vvae_tensor.device_type, in DLPack's numbers. Pinned host memory counts as host memory.
pub const VVAE_DEVICE_CPU: i32 = 1;
pub const VVAE_DEVICE_CUDA: i32 = 2;
pub const VVAE_DEVICE_CUDA_HOST: i32 = 3;
/// Of vvae_device_info alone: a Vulkan device takes tensors in host memory.
pub const VVAE_DEVICE_VULKAN: i32 = 7;

/// vvae_tensor.dtype: DLPack's code | bits << 8 | lanes << 16. Integer pixels use the full range of the type and are
/// rounded on output. The key pixel_range sets the range of float pixels. Latents are floats.
pub const VVAE_DTYPE_U8: u32 = 1 | (8 << 8) | (1 << 16);
pub const VVAE_DTYPE_U16: u32 = 1 | (16 << 8) | (1 << 16);
pub const VVAE_DTYPE_F16: u32 = 2 | (16 << 8) | (1 << 16);
pub const VVAE_DTYPE_BF16: u32 = 4 | (16 << 8) | (1 << 16);
pub const VVAE_DTYPE_F32: u32 = 2 | (32 << 8) | (1 << 16);

/// Levels of the log callback.
pub const VVAE_LOG_DEBUG: i32 = 0;
pub const VVAE_LOG_INFO: i32 = 1;
pub const VVAE_LOG_WARNING: i32 = 2;
pub const VVAE_LOG_ERROR: i32 = 3;

/// vvae_run_info.flags: cuda_stream is set; 0 is then the default stream.
pub const VVAE_RUN_HAS_STREAM: u32 = 1;

/// vvae_trim: the workspace. The next call allocates it again.
pub const VVAE_TRIM_WORKSPACE: u32 = 1;
/// vvae_trim: the weights, unless another handle uses them too. The next call loads them again.
pub const VVAE_TRIM_WEIGHTS: u32 = 2;

/// vvae_port_desc.direction
pub const VVAE_PORT_INPUT: u32 = 0;
pub const VVAE_PORT_OUTPUT: u32 = 1;

/// vvae_param_desc.kind
pub const VVAE_PARAM_INT: u32 = 0;
pub const VVAE_PARAM_FLOAT: u32 = 1;
pub const VVAE_PARAM_BOOL: u32 = 2;
pub const VVAE_PARAM_CHOICE: u32 = 3;
/// A number of bytes, or of a unit with decimals: KiB, MiB, GiB, KB, MB, GB, such as 2.7GiB.
pub const VVAE_PARAM_BYTES: u32 = 4;
/// A text in a form of its own, such as that of "rates".
pub const VVAE_PARAM_TEXT: u32 = 5;
/// vvae_param_desc.flags: the value may be "auto".
pub const VVAE_PARAM_HAS_AUTO: u32 = 1;
/// vvae_param_desc.flags: min, max and step are meaningful.
pub const VVAE_PARAM_HAS_RANGE: u32 = 2;

/// A model on a device, with its settings. Made by vvae_create, ended by vvae_free.
///
/// The pointer is a number that is never reused, not an address. A handle that was freed or made up gets
/// VVAE_ERROR_STATE. Functions tagged [handle] are for one thread at a time: if the handle is in use, also in a
/// callback of a call on it, they return VVAE_ERROR_STATE at once. Functions tagged [any-thread] work at any time.
/// Handles are independent of each other.
///
/// Calls compute in the processor's default floating-point mode, whatever the caller's: round to nearest, keep
/// denormals. The caller's mode is restored. Callbacks run in the default mode.
///
/// A child of fork() has no threads of the library. If a handle was created before the fork, vvae_create and functions
/// with a handle or a stream return VVAE_ERROR_STATE in the child. vvae_free does so too, and frees nothing. A
/// vvae_create that failed does not count.
///
/// A thread that calls the library needs a stack of 256 KiB, and more if its callbacks do.
pub struct vvae {
    _private: (),
}

/// A clip in pieces. It belongs to its handle and is closed with it.
pub struct vvae_stream {
    _private: (),
}

/// A tensor in the host's memory. It has the layout of DLPack's DLTensor, so a pointer to one can be cast.
///
/// It owns no memory and is read during the call only. The axes are B, C, T, H, W: clips, channels, frames, rows,
/// columns. Strides describe the memory layout: interleaved pixels [T, H, W, 3] have the strides
/// { T*H*W*3, 1, H*W*3, W*3, 3 }.
///
/// An output must not share a byte with another tensor of the call: VVAE_ERROR_TENSOR. Address ranges may overlap if
/// the elements do not: latent and logvar may be the two halves of one [B, 2*C, T, H, W] buffer, in any layout. The
/// check is exact for slices of permuted or padded buffers. Layouts that take too long to check are refused.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_tensor {
    pub data: *mut c_void,
    /// VVAE_DEVICE_...
    pub device_type: i32,
    pub device_id: i32,
    /// 5
    pub ndim: i32,
    /// VVAE_DTYPE_...
    pub dtype: u32,
    /// Five numbers.
    pub shape: *const i64,
    /// Five numbers, in elements; they may be negative. NULL: compact, columns innermost.
    pub strides: *const i64,
    /// Added to data.
    pub byte_offset: u64,
}

/// Writes a line of log. Called on the thread of the call that logs. `message` is valid until the callback returns.
/// Must not throw.
pub type vvae_log_fn = Option<unsafe extern "C" fn(user: *mut c_void, level: i32, message: *const c_char)>;

/// Allocates host memory, aligned to `align` (a power of two), or returns NULL. Called from any thread; must not throw.
/// Functions of this library that take a handle, and vvae_create, return VVAE_ERROR_STATE in it; vvae_cancel works.
pub type vvae_alloc_fn = Option<unsafe extern "C" fn(user: *mut c_void, bytes: u64, align: u64) -> *mut c_void>;

/// Frees a block. Called as vvae_alloc_fn is.
pub type vvae_free_fn = Option<unsafe extern "C" fn(user: *mut c_void, block: *mut c_void, bytes: u64)>;

/// Allocates memory on CUDA device `device`, aligned to 256 bytes, or returns NULL. No work of the host may still use
/// the block, on any stream. Called from any thread, with the device's primary context current. Must not throw.
/// It may call this library as vvae_alloc_fn may.
pub type vvae_device_alloc_fn = Option<unsafe extern "C" fn(user: *mut c_void, device: i32, bytes: u64) -> *mut c_void>;

/// Frees a block. No work of the library still uses it. Called as vvae_device_alloc_fn is.
pub type vvae_device_free_fn =
    Option<unsafe extern "C" fn(user: *mut c_void, device: i32, block: *mut c_void, bytes: u64)>;

/// Reports progress, on the thread of the call. `total` is 0 if it is not known. `stage` is "check", "plan",
/// "load", "encode" or "decode". A result other than 0 cancels the call. Must not throw.
pub type vvae_progress_fn =
    Option<unsafe extern "C" fn(user: *mut c_void, done: u64, total: u64, stage: *const c_char) -> i32>;

/// Arguments of vvae_create. As with every struct here, set struct_size to sizeof and unused fields to zero. A shorter
/// struct, of an older header, is extended with zeros. A longer one is refused if fields that this library does not
/// know are not zero.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_create_info {
    pub struct_size: u32,
    /// VVAE_ABI_VERSION
    pub abi_version: u32,
    /// Path of the checkpoint, a safetensors file. This and every text is UTF-8 and ends with a NUL.
    pub weights: *const c_char,
    /// "cpu", "cuda:0", ... as vvae_device_info lists them, or "auto"; NULL: "auto". Or a list of devices that divide
    /// the work, such as "cuda:0,cuda:1", and "cuda:*" for all CUDA devices. "vulkan:0", ... are GPUs through Vulkan.
    /// "auto" is the first CUDA device. Without one it is a discrete GPU with matrix units through Vulkan. Without that
    /// too, or if it cannot be opened, it is the CPU. vvae_handle_device says which. All take tensors in host memory.
    pub device: *const c_char,
    /// May be NULL.
    pub log: vvae_log_fn,
    pub log_user: *mut c_void,
    /// The host's allocator for host memory: both functions or none. It must work until the last handle made with it is
    /// freed, and every handle of the same checkpoint too: these share weights.
    pub alloc: vvae_alloc_fn,
    pub free: vvae_free_fn,
    pub alloc_user: *mut c_void,
    /// The host's allocator for device memory: both functions or none. It gives weights and workspaces, each in one
    /// block, within the bytes that vvae_plan reports. If it returns NULL, the job is planned again with less. "auto"
    /// as memory_limit still means what the driver has free. Not used on the CPU. It must work as long as `alloc` must.
    pub device_alloc: vvae_device_alloc_fn,
    pub device_free: vvae_device_free_fn,
    pub device_alloc_user: *mut c_void,
    /// Called while the file is checked, with its bytes and "check" as the stage. May be NULL.
    pub progress: vvae_progress_fn,
    pub progress_user: *mut c_void,
}

/// Options of one run. NULL means all zeros.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_run_info {
    pub struct_size: u32,
    /// VVAE_RUN_...
    pub flags: u32,
    /// With VVAE_RUN_HAS_STREAM and all tensors on the handle's device, work is queued on this CUstream, and the call
    /// returns without waiting for it. It waits only if the driver's queue is full, or for work of earlier calls before
    /// it loads weights or replaces the workspace. Progress then counts queued work. A cancel stops queueing; queued
    /// work runs. A handle with several devices refuses it. In every other case it is ignored: work is finished when
    /// the call returns, and tensors on a device must be ready before the call.
    pub cuda_stream: *mut c_void,
    /// May be NULL.
    pub progress: vvae_progress_fn,
    pub progress_user: *mut c_void,
    /// Encode: output for the log-variance, in the shape of the latent. May be NULL.
    pub logvar: *const vvae_tensor,
}

/// The sizes of a model, and the latents of the diffusion model that it belongs to. Sizes give the shapes of tensors.
///
/// A video [B, pixel_channels, T, H, W] has the latent
/// [B, latent_channels, 1 + ceil((T - 1) / time_scale), ceil(H / spatial_scale), ceil(W / spatial_scale)].
/// With latents=model it has packed_channels, and spatial_scale * packing in place of spatial_scale.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_model_desc {
    pub struct_size: u32,
    /// Of video that is encoded.
    pub pixel_channels: u32,
    pub latent_channels: u32,
    pub spatial_scale: u32,
    pub time_scale: u32,
    /// Of video that is decoded. Since ABI 2.1, as is all that follows.
    pub decoded_channels: u32,
    /// Rows, and columns, of a latent that are one with latents=model; their pixels are channels there. 1: none are.
    pub packing: u32,
    /// Channels of a latent with latents=model.
    pub packed_channels: u32,
    /// 1: the library knows how the diffusion model scales latents, so latents=model can be set. What follows says it.
    /// 0: no published model has such latents, or several have, and latent_format says which one.
    pub latents_known: u32,
    /// Means, and deviations: one for each of packed_channels, or 0.
    pub statistics_count: u32,
    /// The name of its family of models.
    pub family: [c_char; 20],
    /// The published model whose latents these are, as in the key latent_format. Empty if they are not known, or if a
    /// config.json beside the checkpoint has numbers of no published model.
    pub latent_format: [c_char; 20],
    /// The published models whose latents these may be: names with commas between them.
    pub latent_formats: [c_char; 64],
    /// statistics_count is 0: the diffusion model reads (z - latent_shift) * latent_scale of a raw latent z.
    pub latent_scale: f64,
    pub latent_shift: f64,
    /// statistics_count is not 0: it reads (z - latent_means[c]) / latent_deviations[c], after packing. latent_scale is
    /// then 1 and latent_shift 0. Valid until the handle is freed.
    pub latent_means: *const f64,
    pub latent_deviations: *const f64,
}

/// The plan of a job.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_plan_info {
    pub struct_size: u32,
    /// 1: the same numbers as the authors' implementation, untiled.
    /// 0: close but not the same, in tiles or with cache=u8.
    pub exact: u32,
    /// All device memory. On the CPU this is host memory.
    pub device_bytes: u64,
    /// Pinned host memory. 0 on the CPU.
    pub host_bytes: u64,
    /// The parts of device_bytes.
    pub weight_bytes: u64,
    pub workspace_bytes: u64,
    pub input_shape: [i64; 5],
    pub output_shape: [i64; 5],
    /// A clip goes through the network in slices. Latent frames in a slice, after the first.
    pub slice_frames: i64,
    /// A stage of the network computes the frames of a slice in chunks. Frames in a chunk, per stage: the first
    /// chunk_count numbers.
    pub chunk_frames: [i64; 8],
    pub chunk_count: i64,
    /// 1 and 1 when untiled.
    pub tile_rows: i64,
    pub tile_columns: i64,
    /// In pixels; the whole image and 0 when untiled.
    pub tile_height: i64,
    pub tile_width: i64,
    pub tile_overlap: i64,
    /// Bytes of the whole text, without its NUL.
    pub text_length: u64,
    /// The part of host_bytes for offloaded frames: causal caches and other activations.
    pub offloaded_frame_bytes: u64,
    /// Bytes of caches, frames and weights that are copied between host and device per output frame, both ways
    /// together.
    pub moved_bytes_per_frame: u64,
    /// Estimated time of the job on this device. 0 for a stream.
    pub seconds: f64,
    /// The part of host_bytes for offloaded weights.
    pub offloaded_weight_bytes: u64,
}

/// A run that has finished.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_run_report {
    pub struct_size: u32,
    /// As in vvae_plan_info.
    pub exact: u32,
    /// "encode" or "decode". Valid for ever.
    pub node: *const c_char,
    /// From call to return. Work that was queued on the host's CUDA stream may finish later.
    pub seconds: f64,
    /// The plan's estimate. 0 for a stream.
    pub estimated_seconds: f64,
    /// As in vvae_plan_info, as are the next four.
    pub device_bytes: u64,
    pub host_bytes: u64,
    pub slice_frames: i64,
    pub tile_rows: i64,
    pub tile_columns: i64,
    /// Bytes of the plan's whole text, without its NUL.
    pub text_length: u64,
}

/// Bytes of memory that a handle and its streams hold.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_memory_info {
    pub struct_size: u32,
    /// Open streams.
    pub streams: u32,
    /// Device memory. On the CPU this is host memory.
    pub now: u64,
    /// The maximum of `now`.
    pub peak: u64,
    /// The part of `now` that is kept for the next call. vvae_trim frees it.
    pub reserved: u64,
    /// Pinned host memory: staging buffers, offloaded caches and weights. On the CPU the same as `now`.
    pub host: u64,
}

/// What one device of a handle holds, and its part of a job.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_handle_device_info {
    pub struct_size: u32,
    /// Devices of the handle.
    pub device_count: u32,
    /// As in vvae_tensor.
    pub device_type: i32,
    pub device_id: i32,
    /// As in the list that vvae_create got.
    pub id: [c_char; 20],
    /// 1: the device computes nothing, because it failed or has no room.
    pub unused: u32,
    /// As in vvae_memory_info, as are the next three.
    pub now: u64,
    pub peak: u64,
    pub reserved: u64,
    pub host: u64,
    /// Of the last plan or finished run of the handle, as is what follows: device memory and pinned host memory.
    /// Zeros before the first.
    pub device_bytes: u64,
    pub host_bytes: u64,
    /// The first output frame that it computes, and the clip of the batch that this frame is of.
    pub first_clip: i64,
    pub first_frame: i64,
    /// Output frames that it computes, of all clips together.
    pub frames: i64,
    /// Estimated time.
    pub seconds: f64,
    /// Measured time of the run, from the first operation on. 0 after a plan.
    pub measured_seconds: f64,
}

/// A device of this machine.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_device_desc {
    pub struct_size: u32,
    /// As in vvae_tensor.
    pub device_type: i32,
    pub device_id: i32,
    /// For vvae_create.
    pub id: [c_char; 20],
    /// For people.
    pub name: [c_char; 128],
    pub memory_total: u64,
    pub memory_free: u64,
    /// The driver's identifier of a CUDA device, as nvidia-smi prints it: "GPU-" and 32 hexadecimal digits in five
    /// parts. It does not depend on the order of devices. Empty for the CPU.
    pub uuid: [c_char; 48],
    /// The compute capability of a CUDA device: 8 and 6 for 8.6. 0 and 0 for the CPU.
    pub compute_major: u32,
    pub compute_minor: u32,
}

/// A node: an operation of the library. Texts of nodes, ports and parameters are valid for ever.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_node_desc {
    pub struct_size: u32,
    /// Always 0.
    pub reserved: u32,
    /// For vvae_plan and vvae_stream_open.
    pub id: *const c_char,
    pub label: *const c_char,
    pub help: *const c_char,
}

/// A port: an input or output tensor of a node.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_port_desc {
    pub struct_size: u32,
    /// VVAE_PORT_INPUT or VVAE_PORT_OUTPUT
    pub direction: u32,
    /// 1: may be left out.
    pub optional: u32,
    pub dtype_count: u32,
    /// Accepted element types, VVAE_DTYPE_...
    pub dtypes: *const u32,
    pub name: *const c_char,
    /// "video" or "latent". Ports of the same kind can be connected.
    pub kind: *const c_char,
    pub help: *const c_char,
}

/// A parameter: a key of vvae_configure.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_param_desc {
    pub struct_size: u32,
    /// VVAE_PARAM_INT, ...
    pub kind: u32,
    /// VVAE_PARAM_HAS_...
    pub flags: u32,
    /// Number of words for vvae_choice. 0 unless kind is VVAE_PARAM_CHOICE.
    pub choice_count: u32,
    pub key: *const c_char,
    /// A value for vvae_configure.
    pub default_value: *const c_char,
    /// The unit of a number, such as "pixels". May be empty.
    pub unit: *const c_char,
    pub help: *const c_char,
    pub min: f64,
    pub max: f64,
    /// A step for a slider. Values between steps are accepted.
    pub step: f64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::ir::DType;

    #[test]
    fn constants_are_those_of_the_crate() {
        let text = String::new;
        let errors = [
            (Error::Argument(text()), VVAE_ERROR_ARGUMENT),
            (Error::Tensor(text()), VVAE_ERROR_TENSOR),
            (Error::Checkpoint(text()), VVAE_ERROR_CHECKPOINT),
            (Error::Device(text()), VVAE_ERROR_DEVICE),
            (Error::Memory(text()), VVAE_ERROR_MEMORY),
            (Error::Cancelled, VVAE_ERROR_CANCELLED),
            (Error::State(text()), VVAE_ERROR_STATE),
            (Error::Internal(text()), VVAE_ERROR_INTERNAL),
        ];
        for (error, status) in errors {
            assert_eq!(error.status(), status);
        }
        let dtypes = [VVAE_DTYPE_U8, VVAE_DTYPE_U16, VVAE_DTYPE_F16, VVAE_DTYPE_BF16, VVAE_DTYPE_F32];
        assert_eq!(DType::ALL.map(|d| d as u32), dtypes);
    }
}
