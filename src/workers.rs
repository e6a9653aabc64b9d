//! Short-lived threads for opening, folding and packing a checkpoint, and for planning. They end with the work.

use std::cell::Cell;
use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, available_parallelism, scope};

use crate::{float_mode, reserve};

/// Below this many elements, starting threads costs more than they save.
const WORTH_A_THREAD: usize = 1 << 17;

/// Each thread costs memory, and more than this save little time.
pub const MOST_THREADS: usize = 16;

/// Threads to start for work on this many elements. 0: the calling thread does the work.
pub fn threads_for(elements: usize) -> usize {
    if elements < WORTH_A_THREAD { 0 } else { threads() }
}

/// Threads to start for long work, as in [`threads_for`].
fn threads() -> usize {
    match available_parallelism().map_or(1, usize::from).min(MOST_THREADS) {
        1 => 0,
        threads => threads,
    }
}

thread_local! {
    /// The most threads that [`map`] may start for this thread.
    static MOST: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Runs `work`, in which [`map`] uses at most `most` threads; `None`: all cores.
pub fn with_threads<R>(most: Option<u64>, work: impl FnOnce() -> R) -> R {
    struct Before(usize);
    impl Drop for Before {
        fn drop(&mut self) {
            MOST.set(self.0);
        }
    }
    let most = most.map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX));
    let _before = Before(MOST.replace(most));
    work()
}

/// Maps each item by long work, and keeps their order.
pub fn map<T: Send, R: Send>(items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    // The only thread that is allowed is the calling one.
    let threads = if MOST.get() > 1 { threads().min(MOST.get()) } else { 0 };
    map_on(threads, items, || (), |(), item| work(item))
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

/// Runs `work` on each item, on `threads` new threads or, if that is 0, on the calling one. Every thread has its own
/// state, such as a buffer. Results must not depend on which thread does an item.
pub fn for_each<T: Send, S>(
    threads: usize,
    items: Vec<T>,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, T) + Sync,
) {
    let threads = threads.min(items.len());
    let queue = Mutex::new(items.into_iter());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let run = || {
        let mut state = state();
        while let Some(item) = next() {
            work(&mut state, item);
        }
    };
    // The scope itself needs the handle of this thread.
    if threads == 0 || !reserve::has_room_for_a_thread() {
        return run();
    }
    let run_on_thread = || {
        float_mode::set_default();
        run();
    };
    scope(|in_scope| {
        // If the system refuses a thread, the others do its items.
        let start = |_| match reserve::has_room_for_a_thread() {
            true => Builder::new().spawn_scoped(in_scope, run_on_thread).ok(),
            false => None,
        };
        let started: Vec<_> = (0..threads).filter_map(start).collect();
        if started.is_empty() {
            run();
        }
        // The scope waits for the work only; joining waits until the threads have freed their memory too.
        for thread in started {
            if let Err(panic) = thread.join() {
                resume_unwind(panic);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Condvar;
    use std::time::Duration;

    use super::*;

    #[test]
    fn for_each_runs_every_item_once() {
        for threads in [0, 1, 3] {
            let done = Mutex::new(Vec::new());
            for_each(threads, (0..100).collect(), || (), |(), item| done.lock().unwrap().push(item));
            let mut done = done.into_inner().unwrap();
            done.sort_unstable();
            assert_eq!(done, (0..100).collect::<Vec<i32>>());
        }
    }

    #[test]
    fn map_starts_no_more_threads_than_allowed() {
        // The first items wait until as many threads have one, so that no thread is too late for its share.
        let threads_of = |most, expected| {
            let (seen, changed) = (Mutex::new(HashSet::new()), Condvar::new());
            let work = |_: i32| {
                let mut seen = seen.lock().unwrap();
                seen.insert(std::thread::current().id());
                changed.notify_all();
                let patience = Duration::from_secs(60);
                drop(changed.wait_timeout_while(seen, patience, |seen| seen.len() < expected).unwrap());
            };
            with_threads(most, || map((0..40).collect(), work));
            seen.into_inner().unwrap()
        };
        assert_eq!(threads_of(Some(1), 1), [std::thread::current().id()].into());
        let most = threads().max(1);
        assert_eq!(threads_of(Some(2), most.min(2)).len(), most.min(2));
        assert_eq!(threads_of(None, most).len(), most);
        let stopped = std::panic::catch_unwind(|| with_threads(Some(1), || panic!("a panic")));
        assert!(stopped.is_err() && MOST.get() == usize::MAX, "a panic leaves no limit behind");
    }

    #[test]
    fn map_keeps_the_order_of_items() {
        assert_eq!(map((0..100).collect(), |item: i32| 2 * item), (0..200).step_by(2).collect::<Vec<i32>>());
    }
}
