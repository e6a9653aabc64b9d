//! Structs that begin with their size, so that host and library may be of different versions. In: a shorter struct is
//! extended with zeros, and what a longer one has beyond ours must be zero. Out: as much is written as fits.

use std::mem::{MaybeUninit, size_of};

use super::types::*;
use crate::error::{Error, Result};

/// Longer than any struct: such a size was never set.
const MAX_SIZE: u32 = 4096;

/// A struct of the ABI with its size.
///
/// # Safety
/// The type is `repr(C)`, begins with `struct_size: u32`, and any bytes are a valid value.
pub(super) unsafe trait SizedStruct: Copy {
    const NAME: &str;
    /// Bytes that every version of the struct has.
    const MIN_SIZE: u32;
}

macro_rules! sized {
    ($($name:ident: $min:expr),* $(,)?) => {$(
        // SAFETY: `repr(C)`, `struct_size` first, the rest integers, floats, raw pointers and optional functions.
        unsafe impl SizedStruct for $name {
            const NAME: &str = stringify!($name);
            const MIN_SIZE: u32 = $min;
        }
    )*};
}

sized! {
    // Up to and including the path of the weights.
    vvae_create_info: 16,
    vvae_run_info: 8,
    vvae_model_desc: 8,
    vvae_plan_info: 8,
    vvae_run_report: 8,
    vvae_memory_info: 8,
    vvae_handle_device_info: 8,
    vvae_device_desc: 8,
    vvae_node_desc: 8,
    vvae_port_desc: 8,
    vvae_param_desc: 8,
}

/// Reads the host's struct.
///
/// # Safety
/// `from` is null or points to as many readable bytes as its first four say.
pub(super) unsafe fn read<T: SizedStruct>(argument: &str, from: *const T) -> Result<T> {
    // SAFETY: the caller's promise.
    let theirs = unsafe { size::<T>(argument, from) }?;
    let ours = size_of::<T>();
    // Every version of a struct ends with a whole field.
    if theirs > MAX_SIZE || !(theirs as usize).is_multiple_of(align_of::<T>()) {
        return Err(wrong_size::<T>(argument, theirs));
    }
    let bytes = from.cast::<u8>();
    for at in ours..theirs as usize {
        // SAFETY: within the bytes that the caller vouches for.
        if unsafe { bytes.add(at).read() } != 0 {
            return Err(Error::Argument(format!(
                "{argument}: byte {at} of {} is not zero, but this library knows its first {ours} bytes only; \
                 what is set there needs a newer library",
                T::NAME
            )));
        }
    }
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: the caller vouches for `theirs` bytes to read, and `value` has `ours` to write.
    unsafe { bytes.copy_to_nonoverlapping(value.as_mut_ptr().cast(), ours.min(theirs as usize)) };
    // SAFETY: zeros and the host's bytes are valid for every `SizedStruct`.
    Ok(unsafe { value.assume_init() })
}

/// Checks an output struct before the work.
///
/// # Safety
/// `to` is null or points to as many writable bytes as its first four say.
pub(super) unsafe fn check<T: SizedStruct>(argument: &str, to: *mut T) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { size::<T>(argument, to) }.map(|_| ())
}

/// Writes the host's struct, except its size, as the last step of a call.
///
/// # Safety
/// As for [`check`].
pub(super) unsafe fn write<T: SizedStruct>(argument: &str, to: *mut T, value: T) -> Result<i32> {
    const SIZE: usize = size_of::<u32>();
    // SAFETY: the caller's promise.
    let theirs = unsafe { size::<T>(argument, to) }?;
    let bytes = (theirs as usize).min(size_of::<T>()) - SIZE;
    let from = (&raw const value).cast::<u8>();
    // SAFETY: `bytes` more than `SIZE` are within our value, and within those that the caller vouches for.
    unsafe { from.add(SIZE).copy_to_nonoverlapping(to.cast::<u8>().add(SIZE), bytes) };
    Ok(VVAE_OK)
}

/// # Safety
/// `of` is null or points to as many readable bytes as its first four say.
unsafe fn size<T: SizedStruct>(argument: &str, of: *const T) -> Result<u32> {
    if of.is_null() {
        return Err(Error::Argument(format!("{argument} is null; it must point to a {}", T::NAME)));
    }
    // SAFETY: not null, so the caller vouches for at least these four bytes.
    let theirs = unsafe { of.cast::<u32>().read_unaligned() };
    if theirs < T::MIN_SIZE { Err(wrong_size::<T>(argument, theirs)) } else { Ok(theirs) }
}

fn wrong_size<T: SizedStruct>(argument: &str, theirs: u32) -> Error {
    let (name, ours) = (T::NAME, size_of::<T>());
    Error::Argument(format!("{argument}: struct_size is {theirs}; set it to sizeof({name}), which is {ours} here"))
}

/// What the ABI's own structs cannot show. `tests/abi_misuse.rs` has the rest.
#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq)]
    struct Now {
        struct_size: u32,
        a: u32,
        b: u64,
    }

    // SAFETY: `repr(C)`, `struct_size` first, integers only.
    unsafe impl SizedStruct for Now {
        const NAME: &str = "now";
        const MIN_SIZE: u32 = 8;
    }

    #[test]
    fn what_a_longer_struct_has_beyond_ours_is_not_written() {
        let mut newer = [Now { struct_size: 24, a: 0, b: 0 }, Now { struct_size: 55, a: 66, b: 77 }];
        // SAFETY: there are more bytes than the first struct says.
        unsafe { write("info", newer.as_mut_ptr(), Now { struct_size: 99, a: 1, b: 2 }) }.unwrap();
        assert_eq!(newer, [Now { struct_size: 24, a: 1, b: 2 }, Now { struct_size: 55, a: 66, b: 77 }]);
    }

    #[test]
    fn addresses_need_no_alignment() {
        let mut bytes = [0u8; 32];
        bytes[1] = 16;
        bytes[5] = 7;
        // SAFETY: 16 bytes follow.
        let now = unsafe { read("info", bytes[1..].as_ptr().cast::<Now>()) }.unwrap();
        assert_eq!(now, Now { struct_size: 16, a: 7, b: 0 });
    }
}
