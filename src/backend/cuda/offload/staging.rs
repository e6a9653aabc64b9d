//! Frames on their way between host tensors and the device, and weights that are fetched. Each direction has a stream of its own,
//! so that they travel while operations before them, or after them, compute.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use cudarc::driver::sys;

use crate::backend::HostMemory;
use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::device::check;
use crate::backend::cuda::driver::pinned::Pinned;
use crate::backend::cuda::driver::stream::{Event, Stream};
use crate::backend::cuda::launch::tiling::ALIGN;
use crate::backend::cuda::offload::compact::Piece;
use crate::error::{Error, Result};

/// One direction. Two places in pinned memory take turns, so that the host fills or empties one while the other moves. On the device,
/// which is the dearer memory, there is one; but it is made for the widest elements, and its halves take turns too where these will
/// do.
struct Way {
    context: Arc<Context>,
    stream: Stream,
    pinned: Option<Pinned>,
    /// Of each place in pinned memory.
    bytes: u64,
    /// When the last copy from or to each place in pinned memory has ended.
    copied: [Event; 2],
    /// When the last kernel that reads or writes what goes through there has ended.
    used: [Event; 2],
    next: usize,
    /// Whether what went through last took all of the place on the device. Loads know that by both of `used`.
    was_whole: bool,
}

impl Way {
    fn new(context: &Arc<Context>, bytes: u64) -> Result<Way> {
        Ok(Way {
            stream: Stream::new(context)?,
            pinned: if bytes > 0 { Some(Pinned::new(context, bytes)?) } else { None },
            bytes: bytes / 2,
            copied: [Event::new(context)?, Event::new(context)?],
            used: [Event::new(context)?, Event::new(context)?],
            next: 0,
            was_whole: false,
            context: Arc::clone(context),
        })
    }

    /// Where something of so many bytes goes through on the device in its turn: so many bytes into the place, and whose turns that
    /// has to wait for.
    fn on_device(&self, bytes: u64, turn: usize) -> (u64, &'static [usize]) {
        let offset = if bytes > self.half() { 0 } else { turn as u64 * self.half() };
        let turns: &[usize] = match turn {
            _ if bytes > self.half() || self.was_whole => &[0, 1],
            0 => &[0],
            _ => &[1],
        };
        (offset, turns)
    }

    fn half(&self) -> u64 {
        self.bytes / 2 / ALIGN * ALIGN
    }

    /// Whose turn it is, and where that is in pinned memory.
    fn turn(&mut self, bytes: u64) -> Result<(usize, *mut u8)> {
        let Some(pinned) = self.pinned.as_ref().filter(|_| bytes <= self.bytes) else {
            return Err(Error::Internal(format!("{bytes} bytes of staging were not planned")));
        };
        let turn = self.next;
        self.next = 1 - turn;
        self.was_whole = bytes > self.half();
        Ok((turn, pinned.at(turn as u64 * self.bytes, self.bytes)?))
    }
}

impl Drop for Way {
    /// Pinned memory must outlive the copies that use it.
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            let _ = self.stream.wait();
        }
    }
}

/// A frame on its way to the host, and where in pinned memory it arrives.
struct Arrival {
    piece: Piece,
    place: *mut u8,
}

// SAFETY: an address in pinned memory that the same struct as this owns.
unsafe impl Send for Arrival {}

/// Both directions of a job. Every method wants the context to be current.
pub struct Transfers {
    loads: Way,
    stores: Way,
    arrivals: [Option<Arrival>; 2],
    /// When the weights at an address have come.
    fetched: HashMap<u64, Event>,
}

impl Transfers {
    pub fn new(context: &Arc<Context>, staging: HostMemory) -> Result<Transfers> {
        let (loads, stores) = (Way::new(context, staging.load)?, Way::new(context, staging.store)?);
        Ok(Transfers { loads, stores, arrivals: [None, None], fetched: HashMap::new() })
    }

    /// How far into its place on the device the next piece goes that is uploaded, or downloaded.
    pub fn upload_offset(&self, piece: &Piece) -> u64 {
        self.loads.on_device(piece.bytes(), self.loads.next).0
    }

    pub fn download_offset(&self, piece: &Piece) -> u64 {
        self.stores.on_device(piece.bytes(), self.stores.next).0
    }

    /// Sends a piece to where its turn is on the device. What comes now in `compute` waits until it has come.
    pub fn upload(&mut self, piece: &Piece, staged: u64, compute: &Stream) -> Result<()> {
        let (bytes, way) = (piece.bytes(), &mut self.loads);
        let (turn, place) = way.turn(bytes)?;
        way.copied[turn].wait()?;
        // SAFETY: the place is that long and nothing moves from it any more; the view's maker vouches for its memory
        // during the call.
        unsafe { piece.gather(place) };
        let (_, turns) = way.on_device(bytes, turn);
        turns.iter().try_for_each(|turn| way.stream.wait_for(&way.used[*turn]))?;
        // SAFETY: both regions are that long; neither is touched before the events that say so.
        let answer = unsafe { sys::cuMemcpyHtoDAsync_v2(staged, place.cast(), bytes as usize, way.stream.handle()) };
        check("copying a frame to the GPU", answer)?;
        way.copied[turn].record(&way.stream)?;
        compute.wait_for(&way.copied[turn])
    }

    /// Brings the parts of a layer's weights, side by side, to an address that nothing in `compute` needs any more once that has come
    /// as far as it is now.
    pub fn fetch(&mut self, weights: [&[u8]; 2], to: u64, compute: &Stream) -> Result<()> {
        let way = &mut self.loads;
        let arrived = match self.fetched.entry(to) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(Event::new(&way.context)?),
        };
        arrived.between(compute.handle(), way.stream.handle())?;
        let mut place = to;
        for part in weights {
            // SAFETY: whoever plans the job vouches for the place; the weights wait for all streams before they go.
            let answer =
                unsafe { sys::cuMemcpyHtoDAsync_v2(place, part.as_ptr().cast(), part.len(), way.stream.handle()) };
            check("fetching weights", answer)?;
            place += part.len() as u64;
        }
        arrived.record(&way.stream)
    }

    /// What comes now in `compute` waits for the weights at an address.
    pub fn await_fetched(&self, at: u64, compute: &Stream) -> Result<()> {
        match self.fetched.get(&at) {
            Some(arrived) => compute.wait_for(arrived),
            None => Err(Error::Internal("weights are needed that nobody has fetched".into())),
        }
    }

    /// What was uploaded last is read by what is in `compute`, and by nothing that comes later.
    pub fn uploaded_is_read(&self, piece: &Piece, compute: &Stream) -> Result<()> {
        let (_, turns) = self.loads.on_device(piece.bytes(), 1 - self.loads.next);
        turns.iter().try_for_each(|turn| self.loads.used[*turn].record(compute))
    }

    /// What comes now in `compute` may write a piece to where its turn is on the device: what was there has left it.
    pub fn before_download(&self, piece: &Piece, compute: &Stream) -> Result<()> {
        let (_, turns) = self.stores.on_device(piece.bytes(), self.stores.next);
        turns.iter().try_for_each(|turn| compute.wait_for(&self.stores.copied[*turn]))
    }

    /// Fetches what `compute` has just written there. The host has it after [`Transfers::finish`].
    pub fn download(&mut self, piece: &Piece, staged: u64, compute: &Stream) -> Result<()> {
        let turn = self.stores.next;
        self.stores.used[turn].record(compute)?;
        self.arrive(turn)?;
        let (bytes, way) = (piece.bytes(), &mut self.stores);
        let (turn, place) = way.turn(bytes)?;
        way.stream.wait_for(&way.used[turn])?;
        // SAFETY: both regions are that long; the one in pinned memory is read after its event alone, and what was in
        // it has just been taken out.
        let answer = unsafe { sys::cuMemcpyDtoHAsync_v2(place.cast(), staged, bytes as usize, way.stream.handle()) };
        check("copying a frame to the host", answer)?;
        way.copied[turn].record(&way.stream)?;
        self.arrivals[turn] = Some(Arrival { piece: *piece, place });
        Ok(())
    }

    /// Waits for the frames that are under way and writes them into the host's tensors. Forgets them in any case: those
    /// tensors are the host's again.
    pub fn finish(&mut self) -> Result<()> {
        let [first, second] = [0, 1].map(|turn| self.arrive((self.stores.next + turn) % 2));
        first.and(second)
    }

    fn arrive(&mut self, turn: usize) -> Result<()> {
        if let Some(arrival) = self.arrivals[turn].take() {
            self.stores.copied[turn].wait()?;
            // SAFETY: the event says that the copy has ended; the view's maker vouches for its memory during the call.
            unsafe { arrival.piece.scatter(arrival.place) };
        }
        Ok(())
    }

    /// Lets `compute` wait for everything that is under way, and what is uploaded next wait for `compute`: it may go
    /// where frames of the job before still lie.
    pub fn join(&self, compute: &Stream) -> Result<()> {
        let event = Event::new(&self.loads.context)?;
        for ours in [&self.loads.stream, &self.stores.stream] {
            event.between(ours.handle(), compute.handle())?;
        }
        event.between(compute.handle(), self.loads.stream.handle())
    }

    pub fn wait(&self) -> Result<()> {
        self.loads.stream.wait().and(self.stores.stream.wait())
    }
}
