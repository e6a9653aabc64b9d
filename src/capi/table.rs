//! The table of open handles and streams. A handle is a number that is never reused: one that was freed or made up
//! finds nothing, and nothing is ever read through it.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::{Mutex, MutexGuard};

use super::cancel::CancelSlot;
use super::facts::ModelFacts;
use super::log::Log;
use super::types::*;
use crate::error::{Error, Result};
use crate::exec::{Control, FrameStream, Ledger, OpenModel};
use crate::ir::TensorDevice;
use crate::model::Model;
use crate::report::PlanReport;

thread_local! {
    /// The handle whose failure this thread is telling the host of.
    static LOGGING: Cell<*const Handle> = const { Cell::new(std::ptr::null()) };
}

/// An open `vvae`. A call locks `open`; the rest is for functions that work while a call runs.
pub(super) struct Handle {
    /// `None` once freed, or after a panic.
    open: Mutex<Option<Open>>,
    /// After a panic the handle can only be freed.
    broken: AtomicBool,
    /// Asks the running call to stop.
    cancel: CancelSlot,
    /// Held while a call clears `cancel` and takes the handle. A thread that finds the handle busy can then cancel it.
    starting: Mutex<()>,
    pub model: Arc<Model>,
    /// Never changes: the host has pointers into it.
    pub facts: ModelFacts,
    /// The setting.
    pub latent_format: Mutex<Option<&'static str>>,
    log: Log,
    log_use: Mutex<LogUse>,
    /// The text of the last failure.
    pub error: Mutex<String>,
    /// Memory of session and streams.
    pub ledger: Arc<Ledger>,
    /// Number of open streams.
    pub streams: AtomicU32,
    pub last_run: Mutex<Option<FinishedRun>>,
    /// Of the last plan, or of the last run if that came later; then with its seconds.
    pub last_job: Mutex<Option<FinishedRun>>,
    pub devices: Vec<TensorDevice>,
}

/// Who writes failures to the log. That comes after the call has given up the handle, so another may free it.
#[derive(Default)]
struct LogUse {
    /// Threads that are in the host's callback.
    writers: usize,
    /// The handle is freed: the log may be gone.
    is_closed: bool,
}

/// A run that did not fail.
#[derive(Clone)]
pub(super) struct FinishedRun {
    pub plan: PlanReport,
    pub seconds: f64,
}

pub(super) struct Open {
    pub model: OpenModel,
    pub streams: BTreeMap<usize, Box<dyn FrameStream>>,
}

impl Handle {
    pub fn new(model: OpenModel, facts: ModelFacts, log: Log) -> Handle {
        Handle {
            model: Arc::clone(model.model()),
            facts,
            latent_format: Mutex::new(model.settings().latent_format),
            devices: model.devices.clone(),
            ledger: model.ledger(),
            log,
            log_use: Mutex::default(),
            streams: AtomicU32::new(0),
            open: Mutex::new(Some(Open { model, streams: BTreeMap::new() })),
            broken: AtomicBool::new(false),
            cancel: CancelSlot::claim(),
            starting: Mutex::default(),
            error: Mutex::default(),
            last_run: Mutex::default(),
            last_job: Mutex::default(),
        }
    }

    /// Starts a call: the handle to oneself, or an error at once. Waiting would deadlock in a callback of the running
    /// call. Cancels from before are not for this call; all later ones are.
    pub fn lock(&self) -> Result<MutexGuard<'_, Option<Open>>> {
        if self.is_logging() {
            return Err(busy());
        }
        let _starting = self.starting.lock();
        // A call that ends now leaves its cancel to nobody.
        if self.open.is_locked() {
            return Err(busy());
        }
        self.cancel.requested().store(false, Ordering::Relaxed);
        self.open.try_lock().ok_or_else(busy)
    }

    /// Logs that a call failed, unless the handle was freed since. In the callback the handle is in use, as in one of
    /// a running call; a call that is refused for that is not logged again.
    pub fn log_failure(&self, error: &Error) {
        struct Writing<'a>(&'a Handle, *const Handle);
        impl Drop for Writing<'_> {
            fn drop(&mut self) {
                LOGGING.set(self.1);
                self.0.log_use.lock().writers -= 1;
            }
        }
        if self.is_logging() {
            return;
        }
        let mut log_use = self.log_use.lock();
        if log_use.is_closed {
            return;
        }
        log_use.writers += 1;
        drop(log_use);
        let _writing = Writing(self, LOGGING.replace(self));
        self.log.failure(error);
    }

    /// No failure is logged from now on. Fails while one is.
    pub fn close_log(&self) -> Result<()> {
        let mut log_use = self.log_use.lock();
        if log_use.writers > 0 {
            return Err(busy());
        }
        log_use.is_closed = true;
        Ok(())
    }

    fn is_logging(&self) -> bool {
        std::ptr::eq(LOGGING.get(), self)
    }

    /// Set by a cancel of the running call.
    pub fn cancel_flag(&self) -> &AtomicBool {
        self.cancel.requested()
    }

    /// A run has finished.
    pub fn finished(&self, plan: PlanReport, seconds: f64) {
        let run = FinishedRun { plan, seconds };
        *self.last_job.lock() = Some(run.clone());
        *self.last_run.lock() = Some(run);
    }

    /// A job was planned.
    pub fn planned(&self, plan: &PlanReport) {
        *self.last_job.lock() = Some(FinishedRun { plan: plan.clone(), seconds: 0.0 });
    }

    /// For the running call.
    pub fn control(&self) -> Control<'_> {
        Control { log: &self.log, ..Control::new(self.cancel.requested()) }
    }

    pub fn check_intact(&self) -> Result<()> {
        if self.broken.load(Ordering::Acquire) {
            return Err(Error::State(
                "the handle is broken: an internal error ended an earlier call; free it and create another".into(),
            ));
        }
        Ok(())
    }

    pub fn mark_broken(&self) {
        self.broken.store(true, Ordering::Release);
        self.cancel.close();
    }
}

fn busy() -> Error {
    Error::State("the handle is busy: another call on it has not returned yet; call again when it has".into())
}

/// What a number stands for.
struct Entry {
    /// Itself, or the owner of the stream.
    handle: Arc<Handle>,
    is_stream: bool,
}

struct HandleTable {
    last: usize,
    entries: BTreeMap<usize, Entry>,
}

impl HandleTable {
    fn insert(&mut self, handle: Arc<Handle>, is_stream: bool) -> usize {
        self.last += 1;
        // Shifted to look like an aligned address.
        let id = self.last << 4;
        self.entries.insert(id, Entry { handle, is_stream });
        id
    }

    fn find(&self, id: usize, is_stream: bool) -> Option<Arc<Handle>> {
        self.entries.get(&id).filter(|entry| entry.is_stream == is_stream).map(|entry| entry.handle.clone())
    }
}

static TABLE: Mutex<HandleTable> = Mutex::new(HandleTable { last: 0, entries: BTreeMap::new() });

pub(super) fn insert(handle: Handle) -> *mut vvae {
    let handle = Arc::new(handle);
    let id = TABLE.lock().insert(Arc::clone(&handle), false);
    handle.cancel.open(id);
    std::ptr::without_provenance_mut(id)
}

pub(super) fn insert_stream(owner: Arc<Handle>) -> usize {
    TABLE.lock().insert(owner, true)
}

pub(super) fn find(v: *const vvae) -> Result<Arc<Handle>> {
    if v.is_null() {
        return Err(Error::Argument("v is null; it must be a handle from vvae_create".into()));
    }
    TABLE.lock().find(v.addr(), false).ok_or_else(|| not_open(v))
}

pub(super) fn not_open(v: *const vvae) -> Error {
    Error::State(format!("v ({v:p}) is not an open handle: it was freed, or vvae_create never gave it"))
}

/// The handle that owns a stream.
pub(super) fn find_stream(s: *const vvae_stream) -> Result<Arc<Handle>> {
    if s.is_null() {
        return Err(Error::Argument("s is null; it must be a stream from vvae_stream_open".into()));
    }
    TABLE.lock().find(s.addr(), true).ok_or_else(|| stream_not_open(s))
}

pub(super) fn stream_not_open(s: *const vvae_stream) -> Error {
    Error::State(format!(
        "s ({s:p}) is not an open stream: it or its handle was closed, or vvae_stream_open never gave it"
    ))
}

/// Removes a handle and its streams from the table. The caller drops them.
pub(super) fn remove(handle: &Arc<Handle>) {
    TABLE.lock().entries.retain(|_, entry| !Arc::ptr_eq(&entry.handle, handle));
}

pub(super) fn remove_stream(s: *const vvae_stream) {
    TABLE.lock().entries.remove(&s.addr());
}
