//! Wraps every function of the ABI: finds and locks the handle, catches panics, turns the result into a status and an
//! error text.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::table::{self, Handle, Open};
use super::text;
use super::types::*;
use crate::backend::allocator;
use crate::error::{Error, Result};
use crate::exec::FrameStream;
use crate::float_mode::DefaultMode;

/// The result of a call that did not fail: `VVAE_OK` or flow control.
pub(super) type Status = i32;

/// Functions that return a value and cannot fail; `otherwise` is returned after a panic.
pub(super) fn value<T>(otherwise: T, body: impl FnOnce() -> T) -> T {
    caught(body).unwrap_or(otherwise)
}

/// Functions without a handle.
pub(super) fn call(body: impl FnOnce() -> Result<Status>) -> Status {
    let _mode = DefaultMode::enter();
    settle(None, caught(body).unwrap_or_else(Err))
}

/// Functions that also work on a busy handle.
pub(super) fn intact(v: *const vvae, body: impl FnOnce(&Handle) -> Result<Status>) -> Status {
    any_time(v, |handle| handle.check_intact().and_then(|()| body(handle)))
}

/// Functions that also work on a busy or broken handle.
pub(super) fn any_time(v: *const vvae, body: impl FnOnce(&Arc<Handle>) -> Result<Status>) -> Status {
    with_handle(|| table::find(v), body)
}

/// Functions that lock the handle.
pub(super) fn exclusive(v: *const vvae, body: impl FnOnce(&Arc<Handle>, &mut Open) -> Result<Status>) -> Status {
    with_handle(|| table::find(v), |handle| locked(handle, || table::not_open(v), body))
}

/// Functions that lock the handle of a stream.
pub(super) fn on_stream(
    s: *const vvae_stream,
    body: impl FnOnce(&Handle, &mut dyn FrameStream) -> Result<Status>,
) -> Status {
    let body = |handle: &Arc<Handle>, open: &mut Open| match open.streams.get_mut(&s.addr()) {
        Some(stream) => body(handle, &mut **stream),
        None => Err(table::stream_not_open(s)),
    };
    with_handle(|| table::find_stream(s), |handle| locked(handle, || table::stream_not_open(s), body))
}

/// Closes a stream, also one of a broken handle.
pub(super) fn close_stream(s: *const vvae_stream) -> Status {
    let close = |handle: &Arc<Handle>| {
        if handle.check_intact().is_ok() {
            let remove = |_: &Arc<Handle>, open: &mut Open| {
                drop(open.streams.remove(&s.addr()));
                open.model.stream_closed();
                Ok(VVAE_OK)
            };
            locked(handle, || table::stream_not_open(s), remove)?;
        }
        table::remove_stream(s);
        Ok(VVAE_OK)
    };
    with_handle(|| table::find_stream(s), close)
}

/// The process that handles were created in, and in the lower half how many: those that were, or are being, created.
/// One number, so that a child never sees half of a change.
static CREATED: AtomicU64 = AtomicU64::new(0);

/// The creation of a handle. Made before anything that a fork would break: threads, locks, device contexts.
pub(super) struct Creation(());

impl Creation {
    pub fn begin() -> Creation {
        let process = u64::from(std::process::id()) << 32;
        let count = |created: u64| Some(process | ((created & u64::from(u32::MAX)) + 1));
        let _ = CREATED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count);
        Creation(())
    }

    /// There is a handle. From now on no child of this process may use the library.
    pub fn succeed(self) {
        std::mem::forget(self);
    }
}

/// It failed, and what it made is gone.
impl Drop for Creation {
    fn drop(&mut self) {
        CREATED.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether this is a child of the process that the handles are in. Safe in a signal handler.
pub(super) fn is_forked() -> bool {
    let created = CREATED.load(Ordering::Relaxed);
    created as u32 > 0 && created >> 32 != u64::from(std::process::id())
}

/// Refuses calls that could wait for themselves, or for threads that are not there.
pub(super) fn check_caller() -> Result<()> {
    if is_forked() {
        return Err(Error::State(
            "this process was forked from one that had created a handle; fork before the first vvae_create, or exec"
                .into(),
        ));
    }
    if allocator::is_inside() {
        return Err(Error::State(
            "the call came from an allocator of the host, which the library is waiting for; call when it has returned"
                .into(),
        ));
    }
    Ok(())
}

fn with_handle(
    find: impl FnOnce() -> Result<Arc<Handle>>,
    body: impl FnOnce(&Arc<Handle>) -> Result<Status>,
) -> Status {
    let _mode = DefaultMode::enter();
    match caught(|| check_caller().and_then(|()| find())).unwrap_or_else(Err) {
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

/// Runs `body` with the handle locked. `closed` is the error of a handle that was freed after it was found.
fn locked(
    handle: &Arc<Handle>,
    closed: impl FnOnce() -> Error,
    body: impl FnOnce(&Arc<Handle>, &mut Open) -> Result<Status>,
) -> Result<Status> {
    handle.check_intact()?;
    let mut slot = handle.lock()?;
    // Again: the call that held the lock before may have broken the handle.
    handle.check_intact()?;
    let open = slot.as_mut().ok_or_else(closed)?;
    let outcome = caught(|| {
        let outcome = body(handle, open);
        handle.streams.store(open.streams.len() as u32, Ordering::Relaxed);
        outcome
    });
    outcome.unwrap_or_else(|panic| {
        handle.mark_broken();
        // Its state is unknown and it may hold much memory. A second panic in drop is ignored.
        let wreck = slot.take();
        let _ = caught(|| drop(wreck));
        handle.streams.store(0, Ordering::Relaxed);
        Err(panic)
    })
}

/// The only place that catches panics.
pub(super) fn caught<T>(body: impl FnOnce() -> T) -> Result<T> {
    // Unwind safe: callers mark a handle as broken, so nobody sees what was left half done.
    catch_unwind(AssertUnwindSafe(body)).map_err(|panic| Error::Internal(format!("internal error: {}", words(&*panic))))
}

fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without a text")
}

/// Logs a failure and stores its text. The log comes first: its callback may call the library and fail.
fn settle(handle: Option<&Arc<Handle>>, outcome: Result<Status>) -> Status {
    let error = match outcome {
        Ok(status) => return status,
        Err(error) => error,
    };
    let _ = caught(|| {
        let message = error.to_string();
        if let Some(handle) = handle {
            handle.log_failure(&error);
            handle.error.lock().clone_from(&message);
        }
        text::remember(&message);
    });
    error.status()
}
