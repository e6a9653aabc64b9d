//! What crosses the boundary: numbers, pointers, and structs of them. This file becomes the upper half of the header.

#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_void};

/// What `vvae_abi_version` of this header's library answers: major << 16 | minor. A library of another major is another
/// library; a newer minor has more functions and longer structs.
pub const VVAE_ABI_MAJOR: u32 = 1;
pub const VVAE_ABI_MINOR: u32 = 4;
pub const VVAE_ABI_VERSION: u32 = (VVAE_ABI_MAJOR << 16) | VVAE_ABI_MINOR;

/// Status. 0 is success, above 0 is flow control, below 0 is a failure whose text vvae_error gives.
pub const VVAE_OK: i32 = 0;
/// Streams: push, then pull; or pull, then push the rest.
pub const VVAE_AGAIN: i32 = 1;
/// Streams: everything has been pulled.
pub const VVAE_END: i32 = 2;
/// An argument is null, out of range, or contradicts another one.
pub const VVAE_ERROR_ARGUMENT: i32 = -1;
/// A tensor's shape, strides, type or device do not fit the call.
pub const VVAE_ERROR_TENSOR: i32 = -2;
/// A file cannot be read or written, or is no checkpoint or saved state of this model.
pub const VVAE_ERROR_CHECKPOINT: i32 = -3;
/// The device named does not exist or cannot be used.
pub const VVAE_ERROR_DEVICE: i32 = -4;
/// Neither the limit nor the machine has room for the job.
pub const VVAE_ERROR_MEMORY: i32 = -5;
/// The host asked to stop, by vvae_cancel or by its progress callback.
pub const VVAE_ERROR_CANCELLED: i32 = -6;
/// The call came at the wrong time: the handle is busy, closed, or the stream has ended.
pub const VVAE_ERROR_STATE: i32 = -7;
/// A bug of the library's, caught at its boundary. The handle it happened in can only be freed.
pub const VVAE_ERROR_INTERNAL: i32 = -8;

/// vvae_tensor.device_type, in DLPack's numbers. Pinned host memory is used as host memory.
pub const VVAE_DEVICE_CPU: i32 = 1;
pub const VVAE_DEVICE_CUDA: i32 = 2;
pub const VVAE_DEVICE_CUDA_HOST: i32 = 3;

/// vvae_tensor.dtype, DLPack's code | bits << 8 | lanes << 16. Integers are pixels over the full range of the type,
/// rounded on output; float pixels are in the range named by the key pixel_range. Latents are floats.
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

/// vvae_run_info.flags: cuda_stream says which stream to use, also when it is 0.
pub const VVAE_RUN_HAS_STREAM: u32 = 1;

/// vvae_trim: memory that calls work in. The next call allocates it anew.
pub const VVAE_TRIM_WORKSPACE: u32 = 1;
/// vvae_trim: the weights, unless another handle uses them too. The next call reads them anew.
pub const VVAE_TRIM_WEIGHTS: u32 = 2;

/// vvae_port_desc.direction
pub const VVAE_PORT_INPUT: u32 = 0;
pub const VVAE_PORT_OUTPUT: u32 = 1;

/// vvae_param_desc.kind: what a host draws.
pub const VVAE_PARAM_INT: u32 = 0;
pub const VVAE_PARAM_FLOAT: u32 = 1;
pub const VVAE_PARAM_BOOL: u32 = 2;
pub const VVAE_PARAM_CHOICE: u32 = 3;
/// A number of bytes, taken also with a unit: KiB, MiB, GiB, KB, MB, GB.
pub const VVAE_PARAM_BYTES: u32 = 4;
/// vvae_param_desc.flags: the value "auto" is taken too.
pub const VVAE_PARAM_HAS_AUTO: u32 = 1;
/// vvae_param_desc.flags: min, max and step are meaningful.
pub const VVAE_PARAM_HAS_RANGE: u32 = 2;

/// A model on a device, with its settings. Made by vvae_create, ended by vvae_free.
///
/// The pointer is a number that is never used twice, not an address: a handle that was freed, or never was one, gets
/// VVAE_ERROR_STATE. Functions tagged [handle] are for one thread at a time; a call that finds the handle in use, also
/// from within a callback, returns VVAE_ERROR_STATE at once. Functions tagged [any-thread] work at any time. Handles
/// are independent of each other.
pub struct vvae {
    _private: (),
}

/// A clip in pieces. Belongs to the handle it was opened on and ends with it.
pub struct vvae_stream {
    _private: (),
}

/// A tensor in the host's memory, in the layout of DLPack's DLTensor, so a pointer to one can be cast.
///
/// It never owns memory, and is read during the call only. The order is B, C, T, H, W: clips, channels, frames, rows,
/// columns. Strides say how memory is really laid out: frames of interleaved pixels [T, H, W, 3] are described by
/// strides { T*H*W*3, 1, H*W*3, W*3, 3 }.
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
    /// Five numbers, in elements, negative ones too; NULL: compact, columns innermost.
    pub strides: *const i64,
    /// Added to data.
    pub byte_offset: u64,
}

/// Writes a line of log. Called on the thread of the call it tells about, so on several threads if several call. `message`
/// is valid until the callback returns. Must not throw.
pub type vvae_log_fn = Option<unsafe extern "C" fn(user: *mut c_void, level: i32, message: *const c_char)>;

/// Gives a block of host memory, aligned to `align` (a power of two), or NULL. Called from any thread, must not throw.
pub type vvae_alloc_fn = Option<unsafe extern "C" fn(user: *mut c_void, bytes: u64, align: u64) -> *mut c_void>;

/// Takes a block back. Called from any thread, must not throw.
pub type vvae_free_fn = Option<unsafe extern "C" fn(user: *mut c_void, block: *mut c_void, bytes: u64)>;

/// Gives a block of memory on CUDA device `device`: its address, aligned to 256 bytes as cuMemAlloc aligns, or NULL.
/// Nothing of the host's may be left to do in it, on any stream. Called from any thread, with the device's primary
/// context current; must not throw, and must not call this library.
pub type vvae_device_alloc_fn = Option<unsafe extern "C" fn(user: *mut c_void, device: i32, bytes: u64) -> *mut c_void>;

/// Takes a block back. Nothing of the library's is left to do in it. Called as vvae_device_alloc_fn is.
pub type vvae_device_free_fn =
    Option<unsafe extern "C" fn(user: *mut c_void, device: i32, block: *mut c_void, bytes: u64)>;

/// Says how far a call has come, on the thread of the call. `total` is 0 where the end is not known. `stage` is "load",
/// "encode" or "decode". Any answer but 0 cancels the call. Must not throw.
pub type vvae_progress_fn =
    Option<unsafe extern "C" fn(user: *mut c_void, done: u64, total: u64, stage: *const c_char) -> i32>;

/// What vvae_create needs. As with every struct here: set struct_size to sizeof, and what is not used to zero. A shorter
/// one, of an older header, counts as filled up with zeros; a longer one is refused if it asks for what this library
/// does not know.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_create_info {
    pub struct_size: u32,
    /// VVAE_ABI_VERSION
    pub abi_version: u32,
    /// Path of the checkpoint, a safetensors file. This and every text is UTF-8 and ends with a NUL.
    pub weights: *const c_char,
    /// "cpu", "cuda:0", ... as vvae_device_info lists them, or "auto"; NULL: "auto".
    pub device: *const c_char,
    /// May be NULL.
    pub log: vvae_log_fn,
    pub log_user: *mut c_void,
    /// The host's allocator for host memory: both functions or none. Must work until the last handle made with it, and
    /// every handle of the same checkpoint, is freed, as these share weights.
    pub alloc: vvae_alloc_fn,
    pub free: vvae_free_fn,
    pub alloc_user: *mut c_void,
    /// The host's allocator for device memory: both functions or none. Weights and workspaces come from it, each in one
    /// block and within the bytes that vvae_plan says; NULL counts as a device that is full, so that the job is planned
    /// smaller. Where memory_limit is "auto", what the driver has free still decides. Not used on the CPU. Must work as
    /// long as `alloc` must. Since ABI 1.2, as are the next two.
    pub device_alloc: vvae_device_alloc_fn,
    pub device_free: vvae_device_free_fn,
    pub device_alloc_user: *mut c_void,
}

/// What goes with one run. NULL where a run takes one means all zeros.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_run_info {
    pub struct_size: u32,
    /// VVAE_RUN_...
    pub flags: u32,
    /// With VVAE_RUN_HAS_STREAM and all tensors on the handle's device, work is ordered on this CUstream and the call
    /// returns without waiting for it, unless the driver has no room to queue more; only to load weights and to change
    /// the workspace it waits for what earlier calls left. Progress then tells what was queued, and a cancel keeps the
    /// rest from being queued: what is in the stream runs. In every other case, tensors in host memory included, it
    /// changes nothing: the work is finished when the call returns, and what is in a tensor on a device has to be there
    /// before the call.
    pub cuda_stream: *mut c_void,
    /// May be NULL.
    pub progress: vvae_progress_fn,
    pub progress_user: *mut c_void,
    /// Encode: where to write the log-variance, in the shape of the latent. May be NULL.
    pub logvar: *const vvae_tensor,
}

/// The sizes of a model, which make the shapes of its tensors.
///
/// A video [B, pixel_channels, T, H, W] has the latent
/// [B, latent_channels, 1 + ceil((T - 1) / time_scale), ceil(H / spatial_scale), ceil(W / spatial_scale)].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_model_desc {
    pub struct_size: u32,
    pub pixel_channels: u32,
    pub latent_channels: u32,
    pub spatial_scale: u32,
    pub time_scale: u32,
}

/// What a job takes, known before it runs.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_plan_info {
    pub struct_size: u32,
    /// 1: the numbers of the authors' implementation, untiled. 0: tiles, which are close but never the same.
    pub exact: u32,
    /// Device memory in all; on the CPU this is host memory.
    pub device_bytes: u64,
    /// Host memory beside it.
    pub host_bytes: u64,
    /// The parts of device_bytes.
    pub weight_bytes: u64,
    pub workspace_bytes: u64,
    pub input_shape: [i64; 5],
    pub output_shape: [i64; 5],
    /// Latent frames that go through at a time, after the first.
    pub slice_frames: i64,
    /// Frames that each stage of the network computes at a time, the first chunk_count of the array.
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
    /// The part of host_bytes for frames that the device has no room for, and the bytes of these, and of weights that
    /// wait with them, that move over the bus, both ways together, for each frame that comes out.
    pub past_bytes: u64,
    pub moved_bytes_per_frame: u64,
    /// About how long the job takes on this device; 0 for a stream.
    pub seconds: f64,
    /// The part of host_bytes for weights that wait there until a layer needs them. Since ABI 1.3.
    pub waiting_weight_bytes: u64,
}

/// About a run that has finished. Since ABI 1.4.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_run_report {
    pub struct_size: u32,
    /// As in vvae_plan_info.
    pub exact: u32,
    /// "encode" or "decode". Valid for ever.
    pub node: *const c_char,
    /// From call to return. With a CUDA stream of the host's, work may go on after that.
    pub seconds: f64,
    /// What the plan said, which is 0 for a stream.
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

/// Bytes of memory a handle holds, its streams included.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_memory_info {
    pub struct_size: u32,
    /// Streams that are open.
    pub streams: u32,
    /// Device memory held now; on the CPU this is host memory.
    pub now: u64,
    /// The most `now` has been.
    pub peak: u64,
    /// The part of `now` that waits for the next call, and that vvae_trim would give back.
    pub reserved: u64,
    /// Host memory: staging and offloaded caches; on the CPU the same as `now`.
    pub host: u64,
}

/// A device of this machine.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_device_desc {
    pub struct_size: u32,
    /// As in vvae_tensor.
    pub device_type: i32,
    pub device_id: i32,
    /// What vvae_create takes.
    pub id: [c_char; 20],
    /// What a user knows it by.
    pub name: [c_char; 128],
    pub memory_total: u64,
    pub memory_free: u64,
    /// The driver's own name for a CUDA device, whatever the order they are counted in: "GPU-" and 32 hexadecimal digits in
    /// five parts, as nvidia-smi prints it. Empty for the CPU. Since ABI 1.1, as are the next two.
    pub uuid: [c_char; 48],
    /// The compute capability of a CUDA device, 8 and 6 for 8.6; 0 and 0 for the CPU.
    pub compute_major: u32,
    pub compute_minor: u32,
}

/// A node: something a host can run. Texts of nodes, ports and parameters are valid for ever.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_node_desc {
    pub struct_size: u32,
    /// Always 0.
    pub reserved: u32,
    /// What vvae_plan and vvae_stream_open take.
    pub id: *const c_char,
    pub label: *const c_char,
    pub help: *const c_char,
}

/// A port: a tensor that goes into a node or comes out of it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct vvae_port_desc {
    pub struct_size: u32,
    /// VVAE_PORT_INPUT or VVAE_PORT_OUTPUT
    pub direction: u32,
    /// 1: the node runs without it.
    pub optional: u32,
    pub dtype_count: u32,
    /// The element types it takes, VVAE_DTYPE_...
    pub dtypes: *const u32,
    pub name: *const c_char,
    /// "video" or "latent": ports of one kind can be connected.
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
    /// Number of words vvae_choice gives; 0 unless kind is VVAE_PARAM_CHOICE.
    pub choice_count: u32,
    pub key: *const c_char,
    /// As vvae_configure takes it.
    pub default_value: *const c_char,
    /// What a number counts, such as "pixels"; empty where it counts nothing.
    pub unit: *const c_char,
    pub help: *const c_char,
    pub min: f64,
    pub max: f64,
    /// A good step for a slider; values between steps are taken.
    pub step: f64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::tensor::DType;

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
