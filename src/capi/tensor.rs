//! Checks a tensor of the host and makes a view of it.

use super::types::*;
use crate::error::{Error, Result};
use crate::ir::{AXES, DType, Shape, TensorDevice, View};

/// Checks five numbers of the host.
pub(super) fn shape(argument: &str, dims: [i64; 5]) -> Result<Shape> {
    if let Some(axis) = dims.iter().position(|d| *d < 0) {
        return Err(Error::Tensor(format!("{argument}: shape {dims:?} is negative in {}", AXES[axis])));
    }
    Ok(dims.map(i64::cast_unsigned).into())
}

/// A view of the host's tensor; `writable` for outputs.
///
/// # Safety
/// `tensor` is null or points to a readable `vvae_tensor` whose shape and strides are null or point to five readable
/// numbers, and whose elements may be read (written, if `writable`) for as long as the view is used.
pub(super) unsafe fn view(argument: &str, tensor: *const vvae_tensor, writable: bool) -> Result<View> {
    if tensor.is_null() {
        return Err(Error::Argument(format!("{argument} is null; it must point to a vvae_tensor")));
    }
    // SAFETY: the caller's promise.
    let tensor = unsafe { tensor.read_unaligned() };
    if tensor.ndim != 5 {
        return Err(Error::Tensor(format!("{argument}: ndim is {}; it must be 5, {}", tensor.ndim, axes())));
    }
    let place = place(argument, &tensor)?;
    let dtype = DType::from_code(tensor.dtype).ok_or_else(|| unknown_dtype(argument, tensor.dtype))?;
    // SAFETY: the caller's promise.
    let (dims, strides) = unsafe { (five(tensor.shape), five(tensor.strides)) };
    let Some(dims) = dims else {
        return Err(Error::Tensor(format!("{argument}: shape is null; it must point to 5 numbers, {}", axes())));
    };
    let shape = shape(argument, dims)?;
    let data = offset(argument, &tensor)?;
    View::checked(argument, data, dtype, place, shape, strides, writable)
}

fn axes() -> String {
    AXES.join(", ")
}

/// # Safety
/// `numbers` is null or points to five readable numbers.
pub(super) unsafe fn five(numbers: *const i64) -> Option<[i64; 5]> {
    // SAFETY: the caller's promise.
    (!numbers.is_null()).then(|| unsafe { numbers.cast::<[i64; 5]>().read_unaligned() })
}

fn place(argument: &str, tensor: &vvae_tensor) -> Result<TensorDevice> {
    match tensor.device_type {
        VVAE_DEVICE_CPU | VVAE_DEVICE_CUDA_HOST => Ok(TensorDevice::Cpu),
        VVAE_DEVICE_CUDA => u32::try_from(tensor.device_id).map(TensorDevice::Cuda).map_err(|_| {
            Error::Tensor(format!("{argument}: device_id is {}; the first CUDA device is 0", tensor.device_id))
        }),
        other => Err(Error::Tensor(format!(
            "{argument}: device_type {other} is unknown; it must be {VVAE_DEVICE_CPU} (CPU), {VVAE_DEVICE_CUDA} \
             (CUDA) or {VVAE_DEVICE_CUDA_HOST} (pinned host memory)"
        ))),
    }
}

fn unknown_dtype(argument: &str, dtype: u32) -> Error {
    let (code, bits, lanes) = (dtype & 0xff, dtype >> 8 & 0xff, dtype >> 16);
    // DLPack's codes.
    let kind = match code {
        0 => "signed integer",
        1 => "unsigned integer",
        2 => "float",
        4 => "bfloat",
        5 => "complex",
        6 => "bool",
        _ => "unknown kind",
    };
    let accepted = DType::ALL.map(DType::name).join(", ");
    Error::Tensor(format!(
        "{argument}: dtype {dtype:#010x} ({kind}, {bits} bits, {lanes} lanes) is not accepted; it must be one of \
         {accepted}"
    ))
}

fn offset(argument: &str, tensor: &vvae_tensor) -> Result<*mut u8> {
    let data = tensor.data.cast::<u8>();
    if data.is_null() {
        return Ok(data);
    }
    let offset = usize::try_from(tensor.byte_offset).ok().filter(|o| data.addr().checked_add(*o).is_some());
    match offset {
        Some(offset) => Ok(data.wrapping_add(offset)),
        None => Err(Error::Tensor(format!(
            "{argument}: byte_offset {} reaches further than can be addressed",
            tensor.byte_offset
        ))),
    }
}
