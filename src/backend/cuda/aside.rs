//! A second side of a job: one stage, which moves more than it computes, beside all the others, which compute. What it has to
//! compute goes first, as the bus should never wait.

use std::sync::Arc;

use super::banded::Bands;
use super::context::Context;
use super::pinned::Pinned;
use super::stream::{Event, Stream};
use super::{Cuda, Memory, Queue};
use crate::error::Result;

/// Operations of the side that may wait in its stream: two turns of its stage, so that one begins as soon as it can.
const AHEAD: usize = 32;

pub struct Aside {
    pub stream: Stream,
    pub bands: Bands,
    pub queue: Queue,
    /// Where it marked its progress.
    passed: Event,
}

impl Aside {
    fn new(context: &Arc<Context>, past: &Arc<Pinned>) -> Result<Aside> {
        Ok(Aside {
            stream: Stream::with_priority(context, true)?,
            bands: Bands::new(context, past)?,
            queue: Queue::new(context, AHEAD)?,
            passed: Event::new(context)?,
        })
    }

    /// Waits for everything, on the host.
    pub fn wait(&self) -> Result<()> {
        self.stream.wait().and(self.bands.wait())
    }
}

impl Cuda {
    pub(super) fn take_turn(&self, memory: &mut Memory, apart: bool, waits: bool) -> Result<()> {
        let _current = self.context.enter()?;
        if apart && memory.aside.is_none() {
            memory.aside = Some(Aside::new(&self.context, &memory.past)?);
            self.order_aside(memory)?;
        }
        memory.is_aside = apart;
        match &memory.aside {
            Some(aside) if waits && apart => aside.stream.wait_for(&memory.passed),
            Some(aside) if waits => self.stream.wait_for(&aside.passed),
            _ => Ok(()),
        }
    }

    pub(super) fn mark_passed(&self, memory: &mut Memory) -> Result<()> {
        let _current = self.context.enter()?;
        match memory.aside.as_ref().filter(|_| memory.is_aside) {
            Some(aside) => aside.passed.record(&aside.stream),
            None => memory.passed.record(&self.stream),
        }
    }

    /// What comes aside waits for everything on the main side.
    pub(super) fn order_aside(&self, memory: &Memory) -> Result<()> {
        match &memory.aside {
            Some(aside) => Event::new(&self.context)?.between(self.stream.handle(), aside.stream.handle()),
            None => Ok(()),
        }
    }

    /// What comes on the main side waits for everything aside.
    pub(super) fn join_aside(&self, memory: &Memory) -> Result<()> {
        match &memory.aside {
            Some(aside) => {
                aside.bands.join(&aside.stream)?;
                Event::new(&self.context)?.between(aside.stream.handle(), self.stream.handle())
            }
            None => Ok(()),
        }
    }
}
