//! Pinned host memory, which the copy engines reach directly. Pinning takes as long as computing where a tight limit
//! offloads much. So a large block is pinned part by part beside the work that uses it, and the largest that was left
//! is kept for the next job of any handle on the GPU.

use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;

use cudarc::driver::sys;
use memmap2::MmapMut;
use parking_lot::{Condvar, Mutex};

use super::context::{Context, PrimaryContext};
use super::error::{check, host_memory_exhausted, is_device_lost};
use super::stream::synchronise_all;
use crate::error::{Error, Result};

/// Bytes of a part, of whole large pages. The driver pins one at a time, and launches wait for it meanwhile: by count
/// some 30 ms.
pub const PART: u64 = 256 << 20;
/// Threads that prepare a block. While the driver pins one part, the others touch the pages of the next ones.
const THREADS: usize = 4;
const PAGE: usize = 4096;

/// A block that is kept may be larger than what is asked for by this part of it, and no more: planned bytes are those
/// asked for.
const KEPT_EXCESS: u64 = 16;

/// A block of pinned host memory; or of pageable memory, where the system allows no more to be pinned. It has to be
/// dropped before the streams that copy from and to it.
pub struct PinnedMemory {
    context: Arc<Context>,
    block: Option<PartedBlock<PrimaryContext>>,
    bytes: u64,
}

impl PinnedMemory {
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<PinnedMemory> {
        let block = match KEPT.take(context.gpu.index, bytes) {
            Some(kept) => kept,
            None => PartedBlock::new(context.primary(), bytes, PART)?,
        };
        Ok(PinnedMemory { context: Arc::clone(context), block: Some(block), bytes })
    }

    /// Whether no part is known that could not be pinned.
    pub fn is_pinned(&self) -> bool {
        self.block.iter().all(|block| block.parts.is_pinned())
    }

    /// The address of a region for a copy by the driver, checked to lie in one part: CUDA does not promise that a copy
    /// may cross from one pinned region to the next.
    pub fn copied_at(&self, offset: u64, bytes: u64) -> Result<*mut u8> {
        if (offset % PART).saturating_add(bytes) > PART {
            return Err(Error::Internal(format!("a copy of {bytes} bytes at {offset} crosses parts of a host block")));
        }
        self.at(offset, bytes)
    }

    /// The address of a region for the host, checked to lie in the block. Waits until it is pinned.
    pub fn at(&self, offset: u64, bytes: u64) -> Result<*mut u8> {
        let block = self.block.as_ref().filter(|_| offset.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        let outside =
            || Error::Internal(format!("{bytes} bytes at {offset} are not in a host block of {}", self.bytes));
        block.ok_or_else(outside)?.parts.at(offset, bytes)
    }
}

impl Drop for PinnedMemory {
    /// Waits for copies in flight. Handles share weights, so any of our streams may have some.
    fn drop(&mut self) {
        let (Some(mut block), Ok(_current)) = (self.block.take(), self.context.enter()) else { return };
        block.end();
        synchronise_all(self.context.gpu.index);
        KEPT.put(self.context.gpu.index, block);
    }
}

/// The blocks that are kept.
static KEPT: KeptBlocks<PrimaryContext> = KeptBlocks { blocks: Mutex::new(Vec::new()), above: PART };

/// Bytes that are kept for jobs on a GPU.
pub fn kept_bytes(gpu: u32) -> u64 {
    KEPT.bytes(gpu)
}

/// Releases what is kept for jobs on a GPU, if it is more than `most` bytes and no block for a job with `wanted` bytes.
/// The GPU's primary context is retained.
pub fn keep_at_most(gpu: u32, most: u64, wanted: u64) {
    KEPT.keep_at_most(gpu, most, wanted);
}

/// The largest block that jobs on each GPU have left. It stays while the GPU has a [`Context`].
struct KeptBlocks<P: Pinning> {
    /// With the GPU's index.
    blocks: Mutex<Vec<(u32, PartedBlock<P>)>>,
    /// Larger ones are kept.
    above: u64,
}

impl<P: Pinning> KeptBlocks<P> {
    /// A block for so many bytes, if the one that is kept fits.
    fn take(&self, gpu: u32, bytes: u64) -> Option<PartedBlock<P>> {
        let mut block = self.remove_if(gpu, |kept| fits(kept, bytes))?;
        block.start();
        Some(block)
    }

    /// Keeps a block in place of a smaller one, if it is large and pinned. No copy from or to it is in flight.
    fn put(&self, gpu: u32, block: PartedBlock<P>) {
        if block.bytes() <= self.above.max(self.bytes(gpu)) || !block.parts.is_pinned() {
            return;
        }
        let before = self.remove_if(gpu, |_| true);
        self.blocks.lock().push((gpu, block));
        drop(before);
    }

    /// Takes out the block of a GPU, if its bytes are such.
    fn remove_if(&self, gpu: u32, is_such: impl Fn(u64) -> bool) -> Option<PartedBlock<P>> {
        let mut kept = self.blocks.lock();
        let at = kept.iter().position(|(of, block)| *of == gpu && is_such(block.bytes()))?;
        Some(kept.swap_remove(at).1)
    }

    fn bytes(&self, gpu: u32) -> u64 {
        self.blocks.lock().iter().filter(|(of, _)| *of == gpu).map(|(_, block)| block.bytes()).sum()
    }

    fn keep_at_most(&self, gpu: u32, most: u64, wanted: u64) {
        drop(self.remove_if(gpu, |kept| kept > most && !fits(kept, wanted)));
    }
}

/// Whether a block of so many bytes is taken where `wanted` are asked for.
fn fits(bytes: u64, wanted: u64) -> bool {
    (wanted..=wanted.saturating_add(wanted / KEPT_EXCESS)).contains(&bytes)
}

/// Pins memory, as a driver does. A trait, so that parts can be tested without one.
trait Pinning: Send + Sync + 'static {
    /// Whether the region is pinned now. Everything but a lost device means that the system pins no more, and pageable
    /// memory will do.
    fn pin(&self, start: *mut u8, bytes: usize) -> Result<bool>;
    fn unpin(&self, start: *mut u8);
}

impl Pinning for PrimaryContext {
    fn pin(&self, start: *mut u8, bytes: usize) -> Result<bool> {
        let _current = self.enter()?;
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // A thread of the host may be capturing a graph, which calls like this one would end.
        // SAFETY: exchanges this thread's mode, here and below.
        check("pinning host memory", unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) })?;
        // SAFETY: the region is that long, and lives until it is unregistered.
        let answer = unsafe { sys::cuMemHostRegister_v2(start.cast(), bytes, 0) };
        // SAFETY: as above.
        check("pinning host memory", unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) })?;
        if is_device_lost(answer) {
            check("pinning host memory", answer)?;
        }
        Ok(answer == sys::CUresult::CUDA_SUCCESS)
    }

    fn unpin(&self, start: *mut u8) {
        if let Ok(_current) = self.enter() {
            // SAFETY: registered in `pin`.
            unsafe { sys::cuMemHostUnregister(start.cast()) };
        }
    }
}

/// A block and the threads that prepare it.
struct PartedBlock<P: Pinning> {
    parts: Arc<Parts<P>>,
    workers: Vec<JoinHandle<()>>,
}

impl<P: Pinning> PartedBlock<P> {
    /// Returns when the first part is prepared: so a lost device, and a system that pins nothing, are known at once.
    fn new(pinning: P, bytes: u64, part: u64) -> Result<PartedBlock<P>> {
        let mapped = MmapMut::map_anon(bytes.max(1) as usize);
        let memory = mapped.map_err(|why| host_memory_exhausted(bytes, why))?;
        #[cfg(target_os = "linux")]
        let _ = memory.advise(memmap2::Advice::HugePage);
        let count = memory.len().div_ceil(part as usize);
        let states = States { parts: vec![PartState::Waiting; count], ended: false };
        let (states, changed) = (Mutex::new(states), Condvar::new());
        let parts = Arc::new(Parts { pinning, memory, part, states, changed });
        let mut block = PartedBlock { parts, workers: Vec::new() };
        block.parts.await_part(0)?;
        block.start();
        Ok(block)
    }

    /// Starts the threads. Without them, a part is prepared when it is first needed.
    fn start(&mut self) {
        let waiting = {
            let mut states = self.parts.states.lock();
            states.ended = false;
            states.parts.iter().filter(|part| matches!(part, PartState::Waiting)).count()
        };
        let worker = |_| {
            let parts = Arc::clone(&self.parts);
            let builder = std::thread::Builder::new().name("video-vae-pinning".into());
            builder.spawn(move || parts.prepare_all()).ok()
        };
        self.workers = (0..THREADS.min(waiting)).filter_map(worker).collect();
    }

    fn bytes(&self) -> u64 {
        self.parts.memory.len() as u64
    }

    /// Prepares no more parts, and waits for those that are being prepared.
    fn end(&mut self) {
        self.parts.states.lock().ended = true;
        self.workers.drain(..).for_each(|worker| drop(worker.join()));
    }
}

impl<P: Pinning> Drop for PartedBlock<P> {
    /// No copy from or to it is in flight.
    fn drop(&mut self) {
        self.end();
        self.parts.unpin();
    }
}

#[derive(Clone)]
enum PartState {
    Waiting,
    /// A thread prepares it.
    Begun,
    /// Its pages are there. Whether they are pinned.
    Ready(Result<bool>),
}

struct States {
    parts: Vec<PartState>,
    ended: bool,
}

struct Parts<P> {
    pinning: P,
    memory: MmapMut,
    /// Bytes of each but the last.
    part: u64,
    states: Mutex<States>,
    /// A part has become ready.
    changed: Condvar,
}

impl<P: Pinning> Parts<P> {
    fn at(&self, offset: u64, bytes: u64) -> Result<*mut u8> {
        let total = self.memory.len() as u64;
        let end = offset.checked_add(bytes).filter(|end| *end <= total);
        let Some(end) = end else {
            return Err(Error::Internal(format!("{bytes} bytes at {offset} are not in a host block of {total}")));
        };
        let parts = offset / self.part..end.div_ceil(self.part);
        parts.into_iter().try_for_each(|index| self.await_part(index as usize))?;
        Ok(self.address(offset as usize))
    }

    fn address(&self, offset: usize) -> *mut u8 {
        self.memory.as_ptr().cast_mut().wrapping_add(offset)
    }

    fn bytes_of(&self, index: usize) -> Range<usize> {
        let start = index * self.part as usize;
        start..(start + self.part as usize).min(self.memory.len())
    }

    fn is_pinned(&self) -> bool {
        !self.states.lock().parts.iter().any(|part| matches!(part, PartState::Ready(Ok(false) | Err(_))))
    }

    /// Prepares one part after the other, until none is left or it is told to end.
    fn prepare_all(&self) {
        while let Some(index) = self.claim_next() {
            self.prepare(index);
        }
    }

    /// The first part that nobody prepares yet, for the caller to prepare.
    fn claim_next(&self) -> Option<usize> {
        let mut states = self.states.lock();
        let ended = states.ended;
        let next = states.parts.iter().position(|part| matches!(part, PartState::Waiting)).filter(|_| !ended)?;
        states.parts[next] = PartState::Begun;
        Some(next)
    }

    /// Waits for a part, or prepares it if nobody does.
    fn await_part(&self, index: usize) -> Result<()> {
        let mut states = self.states.lock();
        loop {
            match &states.parts[index] {
                PartState::Ready(outcome) => return outcome.clone().map(|_| ()),
                PartState::Begun => self.changed.wait(&mut states),
                PartState::Waiting => {
                    states.parts[index] = PartState::Begun;
                    drop(states);
                    self.prepare(index);
                    states = self.states.lock();
                }
            }
        }
    }

    /// Touches every page of a part that the caller has claimed, and pins it. The driver would fault pages in one by
    /// one.
    fn prepare(&self, index: usize) {
        let bytes = self.bytes_of(index);
        for page in bytes.clone().step_by(PAGE) {
            // SAFETY: a byte of ours, of a part that nobody else uses yet. Volatile, so that writing a zero over a zero
            // is not optimised away.
            unsafe { self.address(page).write_volatile(0) }
        }
        let pinned = self.pinning.pin(self.address(bytes.start), bytes.len());
        self.states.lock().parts[index] = PartState::Ready(pinned);
        self.changed.notify_all();
    }

    fn unpin(&self) {
        for (index, part) in self.states.lock().parts.iter_mut().enumerate() {
            if matches!(part, PartState::Ready(Ok(true))) {
                self.pinning.unpin(self.address(self.bytes_of(index).start));
                *part = PartState::Ready(Ok(false));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;

    const PAGES: u64 = 4 * PAGE as u64;

    /// A driver that pins up to `most` parts, and begins when it is told to.
    #[derive(Default)]
    struct Simulated {
        most: usize,
        asked: AtomicUsize,
        unpinned: AtomicUsize,
        held: AtomicBool,
        lost: AtomicBool,
    }

    impl Pinning for Arc<Simulated> {
        fn pin(&self, start: *mut u8, bytes: usize) -> Result<bool> {
            assert!(start.addr().is_multiple_of(PAGE) && bytes > 0);
            let asked = self.asked.fetch_add(1, Ordering::SeqCst);
            while asked > 0 && self.held.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            if self.lost.load(Ordering::SeqCst) { Err(Error::Device("lost".into())) } else { Ok(asked < self.most) }
        }

        fn unpin(&self, _: *mut u8) {
            self.unpinned.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn driver(most: usize) -> Arc<Simulated> {
        Arc::new(Simulated { most, ..Simulated::default() })
    }

    #[test]
    fn every_part_is_pinned_once_and_released_once() {
        for bytes in [1, PAGES - 1, PAGES, PAGES + 1, 9 * PAGES + 5] {
            let (driver, parts) = (driver(usize::MAX), bytes.div_ceil(PAGES) as usize);
            let block = PartedBlock::new(Arc::clone(&driver), bytes, PAGES).unwrap();
            let start = block.parts.at(0, bytes).unwrap();
            // SAFETY: the block is that long.
            unsafe { start.add(bytes as usize - 1).write(1) };
            assert_eq!(block.parts.at(bytes - 1, 1).unwrap(), start.wrapping_add(bytes as usize - 1));
            assert!(block.parts.is_pinned() && driver.asked.load(Ordering::SeqCst) == parts, "{bytes}");
            drop(block);
            assert_eq!(driver.unpinned.load(Ordering::SeqCst), parts, "{bytes}");
        }
    }

    #[test]
    fn a_block_is_given_when_its_first_part_is_pinned() {
        let driver = driver(usize::MAX);
        driver.held.store(true, Ordering::SeqCst);
        let block = PartedBlock::new(Arc::clone(&driver), 8 * PAGES, PAGES).unwrap();
        assert!(block.parts.at(0, PAGES).is_ok());
        let waiting = Arc::clone(&block.parts);
        // Whoever needs a part that no worker has begun prepares it.
        let last = std::thread::spawn(move || waiting.at(8 * PAGES - 1, 1).is_ok());
        while driver.asked.load(Ordering::SeqCst) < 2 + THREADS {
            std::thread::yield_now();
        }
        assert!(!last.is_finished(), "it has to wait for the driver");
        driver.held.store(false, Ordering::SeqCst);
        assert!(last.join().unwrap());
    }

    #[test]
    fn a_block_that_is_dropped_early_pins_no_more() {
        let driver = driver(usize::MAX);
        driver.held.store(true, Ordering::SeqCst);
        let block = PartedBlock::new(Arc::clone(&driver), 100 * PAGES, PAGES).unwrap();
        block.parts.states.lock().ended = true;
        driver.held.store(false, Ordering::SeqCst);
        drop(block);
        let asked = driver.asked.load(Ordering::SeqCst);
        assert!(asked <= 1 + THREADS && driver.unpinned.load(Ordering::SeqCst) == asked, "{asked}");
    }

    #[test]
    fn parts_that_cannot_be_pinned_are_pageable_and_a_lost_device_fails() {
        let some = driver(2);
        let block = PartedBlock::new(Arc::clone(&some), 4 * PAGES, PAGES).unwrap();
        assert!(block.parts.at(0, 4 * PAGES).is_ok() && !block.parts.is_pinned());

        let lost = driver(usize::MAX);
        lost.held.store(true, Ordering::SeqCst);
        let block = PartedBlock::new(Arc::clone(&lost), 4 * PAGES, PAGES).unwrap();
        lost.lost.store(true, Ordering::SeqCst);
        lost.held.store(false, Ordering::SeqCst);
        assert!(block.parts.at(0, PAGES).is_ok(), "what was pinned before");
        assert!(matches!(block.parts.at(PAGES, 1), Err(Error::Device(_))));
        assert!(PartedBlock::new(lost, 1, PAGES).is_err());
    }

    #[test]
    fn regions_outside_are_refused() {
        let block = PartedBlock::new(driver(usize::MAX), 2 * PAGES, PAGES).unwrap();
        for (offset, bytes) in [(0, 2 * PAGES + 1), (2 * PAGES, 1), (u64::MAX, 2)] {
            assert!(matches!(block.parts.at(offset, bytes), Err(Error::Internal(_))), "{bytes} at {offset}");
        }
        assert!(block.parts.at(2 * PAGES, 0).is_ok());
    }

    #[test]
    fn the_largest_block_is_kept_for_a_job_of_its_size() {
        const LARGE: u64 = 16 * PAGES;
        let (kept, driver) = (KeptBlocks { blocks: Mutex::new(Vec::new()), above: PAGES }, driver(usize::MAX));
        let block = |bytes: u64| PartedBlock::new(Arc::clone(&driver), bytes, PAGES).unwrap();
        kept.put(0, block(PAGES));
        assert_eq!(kept.bytes(0), 0, "small ones are not kept");
        kept.put(0, block(LARGE));
        kept.put(1, block(2 * LARGE));
        assert_eq!((kept.bytes(0), kept.bytes(1), kept.bytes(2)), (LARGE, 2 * LARGE, 0));
        for other in [PAGES, LARGE / 2, LARGE + 1] {
            assert!(kept.take(0, other).is_none() && kept.bytes(0) == LARGE, "others leave it");
        }
        let again = kept.take(0, LARGE - LARGE / 32).expect("it is hardly too large");
        assert_eq!((again.bytes(), kept.bytes(0)), (LARGE, 0));
        kept.put(0, again);
        kept.put(0, block(LARGE / 2));
        assert_eq!(kept.bytes(0), LARGE, "a smaller one is released");
        kept.put(0, block(2 * LARGE));
        assert_eq!(kept.bytes(0), 2 * LARGE, "one at a time");
        kept.keep_at_most(0, 2 * LARGE, 0);
        kept.keep_at_most(0, 0, 2 * LARGE);
        assert_eq!(kept.bytes(0), 2 * LARGE, "it is within the limit, or wanted");
        kept.keep_at_most(0, 2 * LARGE - 1, LARGE);
        kept.keep_at_most(1, 0, 0);
        assert_eq!((kept.bytes(0), kept.bytes(1)), (0, 0));
        let [asked, unpinned] = [&driver.asked, &driver.unpinned].map(|count| count.load(Ordering::SeqCst));
        assert_eq!(asked, unpinned, "all that was pinned is released");
    }

    #[test]
    fn a_kept_block_goes_on_where_it_ended_and_one_that_is_not_pinned_is_not_kept() {
        let kept = KeptBlocks { blocks: Mutex::new(Vec::new()), above: 0 };
        let slow = driver(usize::MAX);
        slow.held.store(true, Ordering::SeqCst);
        let mut block = PartedBlock::new(Arc::clone(&slow), 100 * PAGES, PAGES).unwrap();
        block.parts.states.lock().ended = true;
        slow.held.store(false, Ordering::SeqCst);
        block.end();
        let before = slow.asked.load(Ordering::SeqCst);
        kept.put(0, block);
        let again = kept.take(0, 100 * PAGES).unwrap();
        assert!(again.parts.at(0, 100 * PAGES).is_ok());
        assert!(before < 100 && slow.asked.load(Ordering::SeqCst) == 100, "{before}");

        let refused = PartedBlock::new(driver(0), PAGES, PAGES).unwrap();
        kept.put(0, refused);
        assert_eq!(kept.bytes(0), 0);
    }
}
