//! A fixed set of threads that sleep between operations and end with the pool.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

use crate::backend::Stop;
use crate::error::{Error, Result};
use crate::float_mode;
use crate::reserve;

/// Runs task `task` on the thread with number `slot`. Long tasks poll `stop` and return early if it is `true`.
pub(super) type Task<'a> = dyn Fn(usize, usize, &mut Stop) + Sync + 'a;

pub(super) struct Pool {
    shared: Arc<PoolShared>,
    workers: Vec<JoinHandle<()>>,
    /// One operation at a time: handles share a pool, and an operation has one scratch area per slot.
    turn: Mutex<()>,
}

#[derive(Default)]
struct PoolShared {
    state: Mutex<PoolState>,
    work: Condvar,
    idle: Condvar,
}

#[derive(Default)]
struct PoolState {
    batch: Option<BatchPointer>,
    /// Counts batches, so that a worker joins each at most once.
    round: u64,
    active: usize,
    quit: bool,
}

/// A batch on the stack of the thread that runs it.
#[derive(Clone, Copy)]
struct BatchPointer(*const TaskBatch<'static>);

// SAFETY: a `TaskBatch` may be shared between threads, and `Pool::run` keeps it alive until no worker is active.
unsafe impl Send for BatchPointer {}

struct TaskBatch<'a> {
    run: &'a Task<'a>,
    tasks: usize,
    next: AtomicUsize,
    halt: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl TaskBatch<'_> {
    /// Runs tasks until none are left. Never unwinds.
    fn take_part(&self, slot: usize, stop: &mut Stop) {
        let end = catch_unwind(AssertUnwindSafe(|| {
            loop {
                if stop() {
                    return self.halt.store(true, Ordering::Relaxed);
                }
                let task = self.next.fetch_add(1, Ordering::Relaxed);
                if task >= self.tasks {
                    return;
                }
                (self.run)(task, slot, &mut || {
                    if stop() {
                        self.halt.store(true, Ordering::Relaxed);
                    }
                    self.halt.load(Ordering::Relaxed)
                });
            }
        }));
        if let Err(panic) = end {
            self.halt.store(true, Ordering::Relaxed);
            self.panic.lock().get_or_insert(panic);
        }
    }
}

impl Pool {
    /// A pool of `threads` threads, including the caller of [`Pool::run`].
    pub fn new(threads: usize) -> Result<Pool> {
        let mut pool = Pool { shared: Arc::default(), workers: Vec::new(), turn: Mutex::new(()) };
        for slot in 1..threads {
            let shared = Arc::clone(&pool.shared);
            if !reserve::has_room_for_a_thread() {
                return Err(reserve::exhausted());
            }
            let worker = std::thread::Builder::new()
                .name(format!("video-vae-{slot}"))
                .spawn(move || serve(&shared, slot))
                .map_err(|why| Error::Device(format!("cannot start thread {slot} of {threads}: {why}")))?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs tasks 0 to `tasks` in any order. Slots are below the number of threads and the number of tasks.
    pub fn run(&self, tasks: usize, stop: &mut Stop, run: &Task) -> Result<()> {
        let turn = self.turn.lock();
        let batch =
            TaskBatch { run, tasks, next: AtomicUsize::new(0), halt: AtomicBool::new(false), panic: Mutex::new(None) };
        let alone = self.workers.is_empty() || tasks < 2;
        if !alone {
            let mut state = self.shared.state.lock();
            state.batch = Some(BatchPointer((&raw const batch).cast()));
            state.round += 1;
            self.shared.work.notify_all();
        }
        batch.take_part(0, &mut || stop() || batch.halt.load(Ordering::Relaxed));
        if !alone {
            let mut state = self.shared.state.lock();
            state.batch = None;
            self.shared.idle.wait_while(&mut state, |state| state.active > 0);
        }
        drop(turn);
        if let Some(panic) = batch.panic.into_inner() {
            resume_unwind(panic);
        }
        if batch.halt.into_inner() { Err(Error::Cancelled) } else { Ok(()) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state.lock().quit = true;
        self.shared.work.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

fn serve(shared: &PoolShared, slot: usize) {
    float_mode::set_default();
    let mut seen = 0;
    let mut state = shared.state.lock();
    loop {
        shared.work.wait_while(&mut state, |state| !state.quit && (state.batch.is_none() || state.round == seen));
        if state.quit {
            return;
        }
        seen = state.round;
        let Some(BatchPointer(batch)) = state.batch else { continue };
        state.active += 1;
        drop(state);
        // SAFETY: `Pool::run` waits until `active` is zero before the batch goes out of scope. `active` was raised
        // under the same lock that the batch was read under.
        let batch = unsafe { &*batch };
        if slot < batch.tasks {
            batch.take_part(slot, &mut || batch.halt.load(Ordering::Relaxed));
        }
        state = shared.state.lock();
        state.active -= 1;
        if state.active == 0 {
            shared.idle.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_on_a_valid_slot() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads).unwrap();
            for tasks in [0, 1, 2, 100] {
                let ran: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, &mut || false, &|task, slot, _| {
                    assert!(slot < threads && slot < tasks);
                    ran[task].fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
                assert!(ran.iter().all(|n| n.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn stopped_batch_leaves_the_pool_usable() {
        let pool = Pool::new(2).unwrap();
        let [asked, ran] = [const { AtomicUsize::new(0) }; 2];
        let end = pool.run(1_000_000, &mut || asked.fetch_add(1, Ordering::Relaxed) >= 10, &|_, _, stop| {
            let turn = ran.fetch_add(1, Ordering::Relaxed);
            // Only the calling thread asks the host. The other one waits for it, however late it is scheduled.
            while turn > 100 * (1 + asked.load(Ordering::Relaxed)) && !stop() {
                std::thread::yield_now();
            }
        });
        assert_eq!(end, Err(Error::Cancelled));
        assert!(ran.into_inner() < 10_000);
        assert_eq!(pool.run(5, &mut || false, &|_, _, _| ()), Ok(()));
    }

    #[test]
    fn task_sees_the_stop_of_another_thread() {
        let pool = Pool::new(2).unwrap();
        let started = AtomicUsize::new(0);
        let end = pool.run(2, &mut || started.load(Ordering::Relaxed) == 2, &|_, _, stop| {
            started.fetch_add(1, Ordering::Relaxed);
            while !stop() {
                std::thread::yield_now();
            }
        });
        assert_eq!(end, Err(Error::Cancelled));
    }

    #[test]
    fn panic_reaches_the_caller_and_leaves_the_pool_usable() {
        let pool = Pool::new(3).unwrap();
        for bad in [0, 7, 63] {
            let end = catch_unwind(AssertUnwindSafe(|| {
                pool.run(64, &mut || false, &|task, _, _| assert_ne!(task, bad, "task of the test")).unwrap();
            }));
            let panic = end.unwrap_err();
            assert!(panic.downcast_ref::<String>().unwrap().contains("task of the test"));
            pool.run(64, &mut || false, &|_, _, _| ()).unwrap();
        }
    }

    #[test]
    fn threads_are_joined_when_the_pool_is_dropped() {
        let alive = Arc::new(());
        let pool = Pool::new(4).unwrap();
        let shared = Arc::downgrade(&pool.shared);
        let held = Arc::clone(&alive);
        pool.run(64, &mut || false, &|_, _, _| assert!(Arc::strong_count(&held) > 0)).unwrap();
        drop(pool);
        assert_eq!(shared.strong_count(), 0, "a running thread would hold the shared state");
    }
}
