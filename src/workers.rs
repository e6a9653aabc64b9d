//! Threads for work done while a checkpoint is opened, folded and packed, or a job planned. They end with the work.

use std::cell::Cell;
use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, available_parallelism, scope};

/// Below this many elements, starting threads costs more than they save.
const WORTH_A_THREAD: usize = 1 << 17;

/// More threads than this would cost more memory than they save time.
const MOST_THREADS: usize = 16;

/// How many threads to start for work on so many elements; 0 means none, the calling thread is enough.
pub fn threads_for(elements: usize) -> usize {
    if elements < WORTH_A_THREAD { 0 } else { threads() }
}

/// The same for work that is worth it.
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

/// What long work makes of each item, in their order.
pub fn map<T: Send, R: Send>(items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let mut made: Vec<Option<R>> = items.iter().map(|_| None).collect();
    let items = items.into_iter().zip(&mut made).collect();
    // The only thread that is allowed is the calling one.
    let threads = if MOST.get() > 1 { threads().min(MOST.get()) } else { 0 };
    for_each(threads, items, || (), |(), (item, made)| *made = Some(work(item)));
    made.into_iter().map(|made| made.expect("every item is done")).collect()
}

/// Gives each item to one of `threads` new threads, or to the calling one where that is 0. Every thread has a state
/// of its own, such as a buffer. What an item's work is must not depend on who does it.
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
    scope(|in_scope| {
        // A system that refuses a thread is no reason to fail; whoever did start takes all there is.
        let started: Vec<_> = (0..threads).filter_map(|_| Builder::new().spawn_scoped(in_scope, run).ok()).collect();
        if started.is_empty() {
            run();
        }
        // The scope alone would wait for the work, not for the threads to be gone with all they hold.
        for thread in started {
            if let Err(panic) = thread.join() {
                resume_unwind(panic);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_once() {
        for threads in [0, 1, 3] {
            let done = Mutex::new(Vec::new());
            for_each(threads, (0..100).collect(), || (), |(), item| done.lock().unwrap().push(item));
            let mut done = done.into_inner().unwrap();
            done.sort_unstable();
            assert_eq!(done, (0..100).collect::<Vec<i32>>());
        }
    }

    #[test]
    fn no_more_threads_work_than_allowed() {
        let threads_of = |most| {
            let work = |_: i32| {
                std::thread::sleep(std::time::Duration::from_millis(2));
                std::thread::current().id()
            };
            let ids = with_threads(most, || map((0..40).collect(), work));
            ids.into_iter().collect::<std::collections::HashSet<_>>()
        };
        assert_eq!(threads_of(Some(1)), [std::thread::current().id()].into());
        assert!(threads_of(Some(2)).len() <= 2);
        assert_eq!(threads_of(None).len(), threads().max(1));
        let stopped = std::panic::catch_unwind(|| with_threads(Some(1), || panic!("a panic")));
        assert!(stopped.is_err() && MOST.get() == usize::MAX, "a panic leaves no limit behind");
    }

    #[test]
    fn results_come_in_the_order_of_their_items() {
        assert_eq!(map((0..100).collect(), |item: i32| 2 * item), (0..200).step_by(2).collect::<Vec<i32>>());
    }
}
