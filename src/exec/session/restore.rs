//! Opens a stream from a saved state.

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::Engine;
use super::ready::{Job, stopped};
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::exec::state::{PIECE, SEAL, SealedReader, StateHeader, StateOwner, refuse};
use crate::exec::stream::{in_pieces, region_of};
use crate::exec::{Control, FrameStream, check};
use crate::plan::{self, Bytes, Plan};
use crate::reserve;

impl<B: Backend> Engine<B> {
    pub(super) fn restore(
        &mut self,
        state: &mut dyn Read,
        bytes: u64,
        control: &Control,
    ) -> Result<Box<dyn FrameStream>> {
        let mut state = SealedReader::new(state, bytes, control.cancel);
        let header =
            StateHeader::read(&mut state, &StateOwner::new(self.place, self.backend.precision(), self.settings.cache))?;
        if header.model != self.model.get()? {
            return Err(refuse("belongs to another checkpoint; open the one that it was saved with"));
        }
        let (direction, input) = (header.direction, header.input);
        let network = &self.coder(direction).network;
        check::input_shape(network, input, true).map_err(refuse)?;
        let cone = check::first_frame(network, header.first).map_err(refuse)?;
        if header.loaded < cone.first_input {
            return Err(refuse("is damaged: it has taken fewer frames than come before its first"));
        }
        let job = Job { direction, input, cone: Arc::new(cone) };
        let plan = self.saved_plan(&header, &job, control.cancel)?;
        // Before every work item is scheduled: a short state must not cost much.
        let target = self.target(control.cancel)?.with_cancel(control.cancel);
        let expected = plan.persisted_bytes(header.loaded, &target).saturating_add(SEAL);
        if state.left() != expected && !target.is_cancelled() {
            let left = state.left();
            return Err(refuse(format_args!("is damaged: {left} bytes follow its header, expected {expected}")));
        }
        let mut schedule = plan.schedule(&target);
        schedule.skip_to(header.loaded, &target);
        if target.is_cancelled() {
            return Err(Error::Cancelled);
        }
        let frames = schedule.persisted_slots();
        self.make_room(direction, &plan);
        self.load_weights(direction, plan.offloaded_weights(), control)?;
        let mut workspace = self.take_workspace(&plan, control)?;
        let mut piece = reserve::filled("a piece of the state", 0, PIECE as usize)?;
        for frame in &frames {
            in_pieces(region_of(schedule.arenas(), frame)?, frame.bytes, |at, bytes| {
                state.read(&mut piece[..bytes])?;
                self.backend.write(&mut workspace.memory, at, &piece[..bytes])
            })?;
        }
        state.check_seal()?;
        self.warn_if_tiled(&plan.report(), control);
        let settings = header.numbers.put_into(self.settings.clone());
        self.streaming(plan, schedule, workspace, settings, input)
    }

    /// The plan that a state was made with, if it fits the present limits.
    fn saved_plan(&self, header: &StateHeader, job: &Job, cancel: &AtomicBool) -> Result<Plan> {
        if header.plan.tiles.is_some() && !self.settings.allow_tiles {
            let why = "this state is of a stream in tiles; set tiles to auto to continue it";
            return Err(Error::Argument(format!("tiles: never, but {why}")));
        }
        let (limit, host_limit) = (self.limit(), self.host_limit());
        let request = self.request(job, limit);
        let target = self.target(cancel)?.with_cancel(cancel);
        let restored = self.with_threads(|| plan::restore(&request, &header.plan, &target));
        if target.is_cancelled() {
            return Err(stopped(cancel));
        }
        let Some(plan) = restored else {
            return Err(refuse("is damaged: its plan is not valid for this model and size"));
        };
        let (device, host) = (plan.device_bytes(), plan.host_bytes());
        for (key, limit, needed) in [("memory_limit", limit, device), ("host_memory_limit", host_limit, host)] {
            if needed > limit {
                return Err(Error::Memory(format!(
                    "{key}: {} is too little to go on from this state, which was saved under a plan of {} ({needed} \
                     bytes). Raise {key}, or give back what else is held",
                    Bytes(limit),
                    Bytes(needed)
                )));
            }
        }
        Ok(plan)
    }
}
