//! Queues whose work runs late, in an order that a random generator chooses among those that events allow.

use std::collections::{HashSet, VecDeque};
use std::panic::Location;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::backend::DeviceSpan;
use crate::backend::gpu::{Event, Queue, Spans};
use crate::error::Result;
use crate::testing::Lcg;

/// A record of an event: the event's number, and which of its records.
type Mark = (usize, u64);

enum Pending {
    Work(Box<dyn FnOnce() + Send>),
    Record(Mark),
    Wait(Mark),
}

/// Where a wait was asked for: file and line.
pub type WaitSite = (&'static str, u32);

/// All queues of a device.
pub struct Clock {
    queues: Vec<VecDeque<Pending>>,
    /// Records of each event so far.
    records: Vec<u64>,
    passed: HashSet<Mark>,
    random: Lcg,
    /// Queues in the order of their speed at the moment.
    speeds: Vec<usize>,
    /// Where waits were asked for, and the place whose waits are left out.
    pub sites: Vec<WaitSite>,
    pub dropped: Option<WaitSite>,
}

impl Clock {
    pub fn new(seed: u64, dropped: Option<WaitSite>) -> Clock {
        let mut random = Lcg(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        random.bits();
        let (records, passed, speeds, sites) = (Vec::new(), HashSet::new(), Vec::new(), Vec::new());
        Clock { queues: Vec::new(), records, passed, random, speeds, sites, dropped }
    }

    fn can_run(&self, queue: usize) -> bool {
        match self.queues[queue].front() {
            Some(Pending::Wait(mark)) => self.passed.contains(mark),
            Some(Pending::Work(_) | Pending::Record(_)) => true,
            None => false,
        }
    }

    /// Takes one step. Queues keep their speed for a while, so that one may run far ahead of another.
    fn step(&mut self) -> Option<Box<dyn FnOnce() + Send>> {
        if self.random.bits().is_multiple_of(6) {
            for i in (1..self.speeds.len()).rev() {
                let other = self.random.bits() as usize % (i + 1);
                self.speeds.swap(i, other);
            }
        }
        let queue = self.speeds.iter().copied().find(|queue| self.can_run(*queue));
        let queue = queue.expect("every queue waits for another");
        match self.queues[queue].pop_front() {
            Some(Pending::Work(work)) => return Some(work),
            Some(Pending::Record(mark)) => _ = self.passed.insert(mark),
            Some(Pending::Wait(_)) | None => {}
        }
        None
    }

    /// The places that wait, each once.
    pub fn wait_sites(&self) -> Vec<WaitSite> {
        let mut sites = self.sites.clone();
        sites.sort_unstable();
        sites.dedup();
        sites
    }

    /// Whether the waits of the calling place are left out.
    #[track_caller]
    fn is_dropped(&mut self) -> bool {
        let caller = Location::caller();
        let site = (caller.file(), caller.line());
        self.sites.push(site);
        self.dropped == Some(site)
    }
}

/// Runs queues until `is_done`. Work runs without the lock, as it may ask for time itself.
fn run_until(clock: &Mutex<Clock>, is_done: impl Fn(&Clock) -> bool) {
    loop {
        let work = {
            let mut clock = clock.lock();
            if is_done(&clock) {
                return;
            }
            clock.step()
        };
        if let Some(work) = work {
            work();
        }
    }
}

pub struct HostEvent {
    clock: Arc<Mutex<Clock>>,
    number: usize,
}

impl HostEvent {
    pub fn new(clock: &Arc<Mutex<Clock>>) -> HostEvent {
        let mut all = clock.lock();
        all.records.push(0);
        HostEvent { clock: Arc::clone(clock), number: all.records.len() - 1 }
    }

    /// Its last record; `None` if it was never recorded.
    fn last(&self) -> Option<Mark> {
        let records = self.clock.lock().records[self.number];
        (records > 0).then_some((self.number, records))
    }
}

impl Event for HostEvent {
    #[track_caller]
    fn synchronise(&self) -> Result<()> {
        let dropped = self.clock.lock().is_dropped();
        if let Some(mark) = self.last().filter(|_| !dropped) {
            run_until(&self.clock, |clock| clock.passed.contains(&mark));
        }
        Ok(())
    }
}

pub struct HostQueue {
    clock: Arc<Mutex<Clock>>,
    number: usize,
}

impl HostQueue {
    pub fn new(clock: &Arc<Mutex<Clock>>) -> HostQueue {
        let mut all = clock.lock();
        let number = all.queues.len();
        all.queues.push(VecDeque::new());
        all.speeds.push(number);
        HostQueue { clock: Arc::clone(clock), number }
    }

    pub fn push(&self, work: impl FnOnce() + Send + 'static) {
        self.clock.lock().queues[self.number].push_back(Pending::Work(Box::new(work)));
    }
}

impl Queue for HostQueue {
    type Event = HostEvent;
    type Spans = NoSpans;

    fn record(&self, event: &HostEvent) -> Result<()> {
        let mut clock = self.clock.lock();
        clock.records[event.number] += 1;
        let mark = (event.number, clock.records[event.number]);
        clock.queues[self.number].push_back(Pending::Record(mark));
        Ok(())
    }

    #[track_caller]
    fn wait_for(&self, event: &HostEvent) -> Result<()> {
        let dropped = self.clock.lock().is_dropped();
        if let Some(mark) = event.last().filter(|_| !dropped) {
            self.clock.lock().queues[self.number].push_back(Pending::Wait(mark));
        }
        Ok(())
    }

    fn synchronise(&self) -> Result<()> {
        run_until(&self.clock, |clock| clock.queues[self.number].is_empty());
        Ok(())
    }

    fn set_spans(&mut self, _: Option<&NoSpans>, _: &'static str) {}
}

/// The device notes no times.
#[derive(Clone, Copy)]
pub enum NoSpans {}

impl Spans for NoSpans {
    fn set_op(&self, _: u64) {}

    fn take(&self) -> Result<Vec<DeviceSpan>> {
        Ok(Vec::new())
    }
}
