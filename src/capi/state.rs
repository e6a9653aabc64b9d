//! Saving and restoring streams, in memory and in files. This file becomes a part of the header.

use std::ffi::{c_char, c_void};
use std::fs::{self, File};
use std::path::Path;

use super::number::check_place;
use super::types::*;
use super::{guard, stream, text};
use crate::error::{Error, Result};
use crate::file;

/// ---- State: a stream that is saved, and restored later or elsewhere ----
///
/// A state is the position of a stream and its causal caches, with the frames of a slice that is not complete yet. It
/// can be saved after a pull returned VVAE_AGAIN and before the clip is ended; otherwise VVAE_ERROR_STATE. Saving does
/// not change the stream. A state is about as large as the stream's memory: 15 GB at 1080p. The first of these calls on
/// a handle reads the checkpoint again, to identify it by its contents. vvae_cancel stops each of these calls.
///
/// Writes the state to `state`, which has room for `capacity` bytes. `*size` is the number of bytes needed. With
/// `state` NULL nothing is written. Too little room is VVAE_ERROR_ARGUMENT. [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_stream_save(
    s: *mut vvae_stream,
    state: *mut c_void,
    capacity: u64,
    size: *mut u64,
) -> i32 {
    guard::on_stream(s, |handle, stream| {
        check_place("size", size, "the number of bytes")?;
        // SAFETY: the host vouches for a pointer that is not null.
        unsafe { size.write_unaligned(0) };
        let bytes = stream.state_bytes()?;
        // SAFETY: as above.
        unsafe { size.write_unaligned(bytes) };
        if state.is_null() {
            return Ok(VVAE_OK);
        }
        if capacity < bytes {
            return Err(Error::Argument(format!("capacity is {capacity}, but the state takes {bytes} bytes")));
        }
        // SAFETY: the host vouches for `capacity` bytes, so there are these too.
        let mut room = unsafe { std::slice::from_raw_parts_mut(state.cast::<u8>(), length(bytes)?) };
        stream.save(&mut room, handle.control().cancel)?;
        Ok(VVAE_OK)
    })
}

/// Writes the state to a file. The file gets its name when it is complete: an earlier file of that name stays until
/// then, and after a failure. A symbolic link to a file is followed. Anything else that exists and is not a regular
/// file is refused. [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_stream_save_file(s: *mut vvae_stream, path: *const c_char) -> i32 {
    guard::on_stream(s, |handle, stream| {
        // SAFETY: the host vouches for a NUL-terminated text.
        let path = Path::new(unsafe { text::read("path", path) }?);
        let control = handle.control();
        // Checked first: a stream that cannot be saved creates no file.
        stream.state_bytes()?;
        file::replace(path, |file| stream.save(file, control.cancel))?;
        Ok(VVAE_OK)
    })
}

/// Opens a stream that continues a saved one, with the same bits on the same model of processor or GPU. The checkpoint,
/// the kind of device, the precision, and the format and revision of the library's states must be the same. Otherwise,
/// and if the state is damaged, VVAE_ERROR_CHECKPOINT; the text names what differs. The saved scaling_factor,
/// pixel_range, posterior, seed and plan apply. If that plan does not fit the present limits, VVAE_ERROR_MEMORY names
/// the bytes. A state may come from anybody: whatever it claims, it is answered within a second, and nothing beyond
/// the limits is allocated. [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_stream_restore(
    v: *mut vvae,
    state: *const c_void,
    size: u64,
    s: *mut *mut vvae_stream,
) -> i32 {
    // SAFETY: the host vouches for where the stream goes, and for so many bytes, which stay as they are.
    unsafe {
        stream::open(v, s, |session, control| {
            if state.is_null() {
                return Err(Error::Argument("state is null; it must point to what vvae_stream_save wrote".into()));
            }
            let mut bytes = std::slice::from_raw_parts(state.cast::<u8>(), length(size)?);
            session.restore_stream(&mut bytes, size, control)
        })
    }
}

/// Restores a stream from a file. [handle]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vvae_stream_restore_file(v: *mut vvae, path: *const c_char, s: *mut *mut vvae_stream) -> i32 {
    // SAFETY: the host vouches for where the stream goes, and for a NUL-terminated text.
    unsafe {
        stream::open(v, s, |session, control| {
            let (mut file, bytes) = open_file(Path::new(text::read("path", path)?))?;
            session.restore_stream(&mut file, bytes, control)
        })
    }
}

/// As the length of a slice.
fn length(bytes: u64) -> Result<usize> {
    let fits = usize::try_from(bytes).ok().filter(|bytes| *bytes <= isize::MAX as usize);
    fits.ok_or_else(|| Error::Argument(format!("size is {bytes}, which is more than memory can hold")))
}

fn open_file(path: &Path) -> Result<(File, u64)> {
    let fail = |why: &dyn std::fmt::Display| Error::Checkpoint(format!("path: {}: {why}", path.display()));
    // Checked first: opening a pipe would wait for a writer.
    if !fs::metadata(path).map_err(|why| fail(&why))?.is_file() {
        return Err(fail(&"is not a regular file, expected one of vvae_stream_save_file"));
    }
    let file = File::open(path).map_err(|why| fail(&why))?;
    let bytes = file.metadata().map_err(|why| fail(&why))?.len();
    Ok((file, bytes))
}
