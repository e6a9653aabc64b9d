//! The way through the boundary, the same for every function: find the handle, take it for oneself if need be, catch
//! panics, and turn what came out into a status and a text.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::table::{self, Handle, Open, OpenStream};
use super::text;
use super::types::*;
use crate::error::{Error, Result};

/// What a function returns where it has no failure: `VVAE_OK` or flow control.
pub(super) type Status = i32;

/// Functions that answer with a number or a pointer and cannot fail; `otherwise` is for what must not happen.
pub(super) fn value<T>(otherwise: T, body: impl FnOnce() -> T) -> T {
    caught(body).unwrap_or(otherwise)
}

/// Functions without a handle.
pub(super) fn call(body: impl FnOnce() -> Result<Status>) -> Status {
    settle(None, caught(body).unwrap_or_else(Err))
}

/// Functions that work at any time, even on a handle that is busy or broken.
pub(super) fn any_time(v: *const vvae, body: impl FnOnce(&Arc<Handle>) -> Result<Status>) -> Status {
    with_handle(|| table::find(v), body)
}

/// Functions that need the handle's session to themselves.
pub(super) fn exclusive(v: *const vvae, body: impl FnOnce(&Arc<Handle>, &mut Open) -> Result<Status>) -> Status {
    with_handle(|| table::find(v), |handle| locked(handle, || table::not_open(v), body))
}

/// Functions that need a stream, and with it its handle, to themselves.
pub(super) fn on_stream(
    s: *const vvae_stream,
    body: impl FnOnce(&Handle, &mut OpenStream) -> Result<Status>,
) -> Status {
    let body = |handle: &Arc<Handle>, open: &mut Open| match open.streams.get_mut(&s.addr()) {
        Some(stream) => body(handle, stream),
        None => Err(table::stream_not_open(s)),
    };
    with_handle(|| table::find_stream(s), |handle| locked(handle, || table::stream_not_open(s), body))
}

/// The end of a stream, which a broken handle has to let happen too.
pub(super) fn close_stream(s: *const vvae_stream) -> Status {
    let close = |handle: &Arc<Handle>| {
        if handle.check_intact().is_ok() {
            locked(
                handle,
                || table::stream_not_open(s),
                |_, open| {
                    drop(open.streams.remove(&s.addr()));
                    Ok(VVAE_OK)
                },
            )?;
        }
        table::remove_stream(s);
        Ok(VVAE_OK)
    };
    with_handle(|| table::find_stream(s), close)
}

fn with_handle(
    find: impl FnOnce() -> Result<Arc<Handle>>,
    body: impl FnOnce(&Arc<Handle>) -> Result<Status>,
) -> Status {
    match caught(find).unwrap_or_else(Err) {
        Ok(handle) => {
            let outcome = caught(|| body(&handle)).unwrap_or_else(|panic| {
                handle.mark_broken();
                Err(panic)
            });
            settle(Some(&handle), outcome)
        }
        Err(error) => settle(None, Err(error)),
    }
}

/// Runs `body` with the handle locked. `closed` is for a handle that was freed between being found and being locked.
fn locked(
    handle: &Arc<Handle>,
    closed: impl FnOnce() -> Error,
    body: impl FnOnce(&Arc<Handle>, &mut Open) -> Result<Status>,
) -> Result<Status> {
    handle.check_intact()?;
    let mut slot = handle.lock()?;
    // Again: the call that we found the lock free after may have broken it.
    handle.check_intact()?;
    let open = slot.as_mut().ok_or_else(closed)?;
    let outcome = caught(|| {
        let outcome = body(handle, open);
        handle.streams.store(open.streams.len() as u32, Ordering::Relaxed);
        outcome
    });
    outcome.unwrap_or_else(|panic| {
        handle.mark_broken();
        // Nobody knows what state it is in, and it may hold much memory. If even dropping it panics, so be it.
        let wreck = slot.take();
        let _ = caught(|| drop(wreck));
        handle.streams.store(0, Ordering::Relaxed);
        Err(panic)
    })
}

/// The one place where a panic stops.
pub(super) fn caught<T>(body: impl FnOnce() -> T) -> Result<T> {
    // Whatever a panic may have left half done is behind a handle, which the callers above mark as broken.
    catch_unwind(AssertUnwindSafe(body)).map_err(|panic| Error::Internal(format!("internal error: {}", words(&*panic))))
}

fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without a text")
}

/// Makes an outcome known: to the log first, as its callback may call us and fail, then as the texts for `vvae_error`.
fn settle(handle: Option<&Arc<Handle>>, outcome: Result<Status>) -> Status {
    let error = match outcome {
        Ok(status) => return status,
        Err(error) => error,
    };
    let _ = caught(|| {
        let message = error.to_string();
        if let Some(handle) = handle {
            handle.log.failure(&error);
            handle.error.lock().clone_from(&message);
        }
        text::remember(&message);
    });
    error.status()
}
