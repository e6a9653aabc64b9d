//! The threads of the library. Backends that compute on the CPU share pools, whose threads start with the first work
//! and end with the last backend. Loading and planning use the same pool, or one of their own for as long as they take.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{Builder, JoinHandle, ScopedJoinHandle, available_parallelism, scope};

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result};
use crate::float_mode;
use crate::reserve;

/// Asked now and then on the calling thread while an operation runs. `true` ends it with [`Error::Cancelled`]. An ended
/// operation may be run again; operations that overwrite their input are never ended.
pub type Stop<'a> = dyn FnMut() -> bool + 'a;

/// Runs task `task` on the thread with number `slot`. Long tasks poll `stop` and return early if it is `true`.
pub type Task<'a> = dyn Fn(usize, usize, &mut Stop) + Sync + 'a;

/// Below this many elements, starting threads costs more than they save.
const WORTH_A_THREAD: usize = 1 << 17;

/// The most threads of loading and planning. Each costs memory, and more than this save little time.
pub const MOST_THREADS: usize = 16;

/// Threads for one operation at a time. They start with the first work for them, and sleep between operations. Handles
/// share them: an operation borrows a team that nobody uses, so there are as many as operations ran at the same time.
pub struct Pool {
    threads: usize,
    idle: Mutex<Vec<Team>>,
}

/// The threads of one operation: the calling one, and the workers.
#[derive(Default)]
struct Team {
    shared: Arc<PoolShared>,
    workers: Vec<JoinHandle<()>>,
}

/// A team that goes back to its pool.
struct Borrowed<'a> {
    pool: &'a Pool,
    team: Team,
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

// SAFETY: a `TaskBatch` may be shared between threads, and `Team::run` keeps it alive until no worker is active.
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
    /// The pool of all handles with so many threads, including the caller of [`Pool::run`].
    pub fn of(threads: usize) -> Arc<Pool> {
        static POOLS: Mutex<Vec<Weak<Pool>>> = Mutex::new(Vec::new());
        let mut pools = POOLS.lock();
        pools.retain(|pool| pool.strong_count() > 0);
        if let Some(found) = pools.iter().filter_map(Weak::upgrade).find(|pool| pool.threads == threads) {
            return found;
        }
        let new = Arc::new(Pool::new(threads));
        pools.push(Arc::downgrade(&new));
        new
    }

    fn new(threads: usize) -> Pool {
        Pool { threads, idle: Mutex::default() }
    }

    pub fn threads(&self) -> usize {
        self.threads
    }

    fn borrow(&self) -> Borrowed<'_> {
        Borrowed { pool: self, team: self.idle.lock().pop().unwrap_or_default() }
    }

    /// Runs tasks 0 to `tasks` in any order. Slots are below the number of threads and the number of tasks.
    pub fn run(&self, tasks: usize, stop: &mut Stop, run: &Task) -> Result<()> {
        let mut team = self.borrow().start(tasks)?;
        team.team.run(tasks, stop, run)
    }
}

impl Borrowed<'_> {
    /// Starts threads for so many tasks, if there are fewer.
    fn start(mut self, tasks: usize) -> Result<Self> {
        let threads = self.pool.threads;
        while self.team.threads() < threads.min(tasks) {
            if !reserve::has_room_for_a_thread() {
                return Err(reserve::exhausted());
            }
            let slot = self.team.threads();
            self.team.start_thread().map_err(|why| {
                Error::Device(format!("threads: cannot start thread {slot} of {threads}: {why}; set it lower"))
            })?;
        }
        Ok(self)
    }
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        self.pool.idle.lock().push(std::mem::take(&mut self.team));
    }
}

impl Team {
    fn start_thread(&mut self) -> std::io::Result<()> {
        let (shared, slot) = (Arc::clone(&self.shared), self.threads());
        let worker = std::thread::Builder::new().name(format!("video-vae-{slot}")).spawn(move || {
            float_mode::set_default();
            EXECUTOR.set(Executor::Alone);
            serve(&shared, slot);
        })?;
        self.workers.push(worker);
        Ok(())
    }

    fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// As [`Pool::run`]. `&mut`: one operation at a time, which has one scratch area per slot.
    fn run(&mut self, tasks: usize, stop: &mut Stop, run: &Task) -> Result<()> {
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
        if let Some(panic) = batch.panic.into_inner() {
            resume_unwind(panic);
        }
        if batch.halt.into_inner() { Err(Error::Cancelled) } else { Ok(()) }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.state.lock().quit = true;
        self.shared.work.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

fn serve(shared: &PoolShared, slot: usize) {
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
        // SAFETY: `Team::run` waits until `active` is zero before the batch goes out of scope. `active` was raised
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

/// Which threads [`for_each`] uses.
#[derive(Clone)]
enum Executor {
    /// As many as there are cores, for as long as the work takes.
    Cores,
    /// Those of a pool.
    Pool(Arc<Pool>),
    /// The calling thread only: it works for a pool now.
    Alone,
}

thread_local! {
    static EXECUTOR: RefCell<Executor> = const { RefCell::new(Executor::Cores) };
}

fn cores() -> usize {
    available_parallelism().map_or(1, usize::from)
}

/// Runs `work`, in which [`for_each`] uses `pool`; or if there is none, at most `most` threads, which end with the work.
/// `None`: all cores.
pub fn with_threads<R>(pool: Option<&Arc<Pool>>, most: Option<u64>, work: impl FnOnce() -> R) -> R {
    let most = most.map_or(cores(), |most| (cores() as u64).min(most) as usize);
    with_executor(Executor::Pool(pool.map_or_else(|| Arc::new(Pool::new(most)), Arc::clone)), work)
}

fn with_executor<R>(executor: Executor, work: impl FnOnce() -> R) -> R {
    struct Before(Executor);
    impl Drop for Before {
        fn drop(&mut self) {
            EXECUTOR.set(std::mem::replace(&mut self.0, Executor::Alone));
        }
    }
    let _before = Before(EXECUTOR.replace(executor));
    work()
}

/// Threads for work on this many elements, including the calling one.
pub fn threads_for(elements: usize) -> usize {
    if elements < WORTH_A_THREAD { 1 } else { threads() }
}

/// Threads for long work.
fn threads() -> usize {
    let most = match EXECUTOR.with_borrow(Executor::clone) {
        Executor::Cores => cores(),
        Executor::Pool(pool) => pool.threads(),
        Executor::Alone => 1,
    };
    most.clamp(1, MOST_THREADS)
}

/// Maps each item by long work, and keeps their order.
pub fn map<T: Send, R: Send>(items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    map_on(threads(), items, || (), |(), item| work(item))
}

/// Maps each item as [`for_each`] visits it, and keeps their order.
pub fn map_on<T: Send, S, R: Send>(
    threads: usize,
    items: Vec<T>,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, T) -> R + Sync,
) -> Vec<R> {
    let mut made: Vec<Option<R>> = items.iter().map(|_| None).collect();
    let items = items.into_iter().zip(&mut made).collect();
    for_each(threads, items, state, |state, (item, made)| *made = Some(work(state, item)));
    made.into_iter().map(|made| made.expect("every item is done")).collect()
}

/// Runs `work` on each item, on at most `threads` threads, of which the calling one is the first. Every thread has its
/// own state, such as a buffer. Results must not depend on which thread does an item.
pub fn for_each<T: Send, S>(
    threads: usize,
    items: Vec<T>,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, T) + Sync,
) {
    let threads = threads.min(items.len());
    let queue = Mutex::new(items.into_iter());
    let run = || {
        let mut state = state();
        loop {
            let Some(item) = queue.lock().next() else { return };
            work(&mut state, item);
        }
    };
    let pool = match EXECUTOR.with_borrow(Executor::clone) {
        Executor::Cores if threads > 1 => Arc::new(Pool::new(cores())),
        Executor::Pool(pool) if threads > 1 => pool,
        _ => return run(),
    };
    with_executor(Executor::Alone, || match pool.borrow().start(threads) {
        Ok(mut team) => team.team.run(threads, &mut || false, &|_, _, _| run()).expect("nothing stops it"),
        // Those that did start are idle in the pool. The calling thread does without them.
        Err(_) => run(),
    });
}

/// The same for work that may fail. After a failure no more items begin.
pub fn try_for_each<T: Send, S>(
    threads: usize,
    items: Vec<T>,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, T) -> Result<()> + Sync,
) -> Result<()> {
    let failure = Mutex::new(None);
    for_each(threads, items, state, |state, item| {
        if failure.lock().is_none()
            && let Err(why) = work(state, item)
        {
            failure.lock().get_or_insert(why);
        }
    });
    failure.into_inner().map_or(Ok(()), Err)
}

/// Runs `work` on each item at the same time, each on a thread of its own, and `meanwhile` on the calling one. Fails
/// where a thread did not start.
pub fn at_once<T: Send, R: Send>(
    items: Vec<T>,
    work: impl Fn(T) -> R + Sync,
    meanwhile: impl FnOnce(),
) -> Vec<Result<R>> {
    if items.is_empty() || !reserve::has_room_for_a_thread() {
        // A scope allocates, and where it cannot, the standard library aborts. `meanwhile` may wait for the items.
        let refused = items.into_iter().map(|_| Err(reserve::exhausted())).collect();
        meanwhile();
        return refused;
    }
    let work = &work;
    scope(|in_scope| {
        let start = |item| {
            let on_thread = move || {
                float_mode::set_default();
                work(item)
            };
            if !reserve::has_room_for_a_thread() {
                return Err(std::io::ErrorKind::OutOfMemory.into());
            }
            Builder::new().spawn_scoped(in_scope, on_thread)
        };
        let started: Vec<_> = items.into_iter().map(start).collect();
        meanwhile();
        let join = |thread: std::io::Result<ScopedJoinHandle<'_, R>>| {
            let thread = thread.map_err(|why| Error::Memory(format!("a thread did not start: {why}")))?;
            Ok(thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
        };
        started.into_iter().map(join).collect()
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::thread::ThreadId;
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_task_runs_once_on_a_valid_slot() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads);
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
        let pool = Pool::new(2);
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
        let pool = Pool::new(2);
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
        let pool = Pool::new(3);
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
        let pool = Pool::new(4);
        let held = Arc::clone(&alive);
        pool.run(64, &mut || false, &|_, _, _| assert!(Arc::strong_count(&held) > 0)).unwrap();
        let shared = Arc::downgrade(&pool.idle.lock()[0].shared);
        drop(pool);
        assert_eq!(shared.strong_count(), 0, "a running thread would hold the shared state");
    }

    #[test]
    fn threads_start_with_the_first_work_and_are_used_again() {
        let pool = Pool::new(3);
        let teams = || pool.idle.lock().iter().map(Team::threads).collect::<Vec<_>>();
        assert!(teams().is_empty());
        for (tasks, expected) in [(1, 1), (2, 2), (64, 3), (2, 3)] {
            pool.run(tasks, &mut || false, &|_, _, _| ()).unwrap();
            assert_eq!(teams(), [expected], "after {tasks} tasks");
        }
        // An operation while another one runs has threads of its own.
        pool.run(1, &mut || false, &|_, _, _| pool.run(3, &mut || false, &|_, _, _| ()).unwrap()).unwrap();
        assert_eq!(teams(), [3, 3]);
    }

    #[test]
    fn pools_of_one_size_are_shared_while_they_are_used() {
        let pool = Pool::of(1001);
        assert!(Arc::ptr_eq(&pool, &Pool::of(1001)) && !Arc::ptr_eq(&pool, &Pool::of(1002)));
        let unused = Arc::downgrade(&pool);
        drop(pool);
        assert!(unused.upgrade().is_none());
    }

    #[test]
    fn for_each_runs_every_item_once() {
        let pool = Arc::new(Pool::new(3));
        for (threads, pool) in [1, 2, 3].into_iter().flat_map(|threads| [(threads, None), (threads, Some(&pool))]) {
            let done = Mutex::new(Vec::new());
            let all = || for_each(threads, (0..100).collect(), || (), |(), item| done.lock().push(item));
            with_threads(pool, None, all);
            let mut done = done.into_inner();
            done.sort_unstable();
            assert_eq!(done, (0..100).collect::<Vec<i32>>());
        }
    }

    /// The threads that [`map`] uses. The first items wait until `expected` threads have one, so that no thread is too
    /// late for its share.
    fn threads_of_map(expected: usize) -> HashSet<ThreadId> {
        let (seen, changed) = (Mutex::new(HashSet::new()), Condvar::new());
        map((0..40).collect(), |_: i32| {
            let mut seen = seen.lock();
            seen.insert(std::thread::current().id());
            changed.notify_all();
            changed.wait_while_for(&mut seen, |seen| seen.len() < expected, Duration::from_secs(60));
        });
        seen.into_inner()
    }

    #[test]
    fn map_uses_no_more_threads_than_allowed() {
        let here = std::thread::current().id();
        assert_eq!(with_threads(None, Some(1), || threads_of_map(1)), [here].into());
        let most = threads();
        assert_eq!(with_threads(None, Some(2), || threads_of_map(most.min(2))).len(), most.min(2));
        assert_eq!(with_threads(None, None, || threads_of_map(most)).len(), most);
        let stopped = catch_unwind(|| with_threads(None, Some(1), || panic!("a panic")));
        assert!(stopped.is_err());
        assert_eq!(threads(), most, "a panic leaves no limit behind");
    }

    #[test]
    fn map_uses_the_threads_of_a_pool() {
        let pool = Arc::new(Pool::new(3));
        pool.run(3, &mut || false, &|_, _, _| ()).unwrap();
        let mut of_pool: HashSet<ThreadId> =
            pool.idle.lock()[0].workers.iter().map(|worker| worker.thread().id()).collect();
        of_pool.insert(std::thread::current().id());
        assert_eq!(with_threads(Some(&pool), Some(1), || threads_of_map(3)), of_pool);
        // Items of an item stay on its thread, because the pool is busy with it.
        let nested = with_threads(Some(&pool), None, || map(vec![(); 8], |()| threads_of_map(1).len()));
        assert_eq!(nested, [1; 8]);
    }

    #[test]
    fn map_keeps_the_order_of_items() {
        assert_eq!(map((0..100).collect(), |item: i32| 2 * item), (0..200).step_by(2).collect::<Vec<i32>>());
    }
}
