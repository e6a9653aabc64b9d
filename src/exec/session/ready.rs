//! From a shape to a plan with its weights loaded and its memory allocated.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::{Engine, warn_not_pinned};
use crate::backend::{Backend, host_memory};
use crate::error::{Error, Result};
use crate::exec::ready_job::ReadyJob;
use crate::exec::search::Job;
use crate::exec::settings::Settings;
use crate::exec::weights::{self, SharedWeights};
use crate::exec::workspace::Workspace;
use crate::exec::{Control, LogLevel};
use crate::model::Direction;
use crate::plan::{MAX_SLICE_LATENTS, Plan};
use crate::report::{Bytes, PlanLimits, PlanReport};
use crate::thread_pool::at_once;

/// What a plan depends on, except free host memory.
#[derive(Clone, PartialEq)]
pub(super) struct Asked {
    job: Job,
    limit: u64,
    settings: Settings,
}

impl<B: Backend> Engine<B> {
    /// Bytes that a job may take of the device, and of host memory beside it. What this session holds may be used again.
    pub(super) fn limits(&self) -> PlanLimits {
        let (settings, idle) = (&self.on.settings, self.idle().map(|held| held.host).sum());
        let free = self.sharing.device_bytes(self.on.device.free_bytes(), &self.ledger);
        PlanLimits {
            device: settings.device_bytes(free),
            host: self.sharing.host_bytes(settings.host_memory_limit, host_memory().available, &self.ledger, idle),
        }
    }

    /// The plan of a job within these limits: that of the last search, if it was for the same and fits in host memory.
    pub(super) fn find_plan(&self, job: &Job, limits: PlanLimits, cancel: &AtomicBool) -> Result<Plan> {
        let asked = Asked { job: job.clone(), limit: limits.device, settings: self.on.settings.clone() };
        let mut planned = self.planned.lock();
        if let Some((_, known)) =
            planned.as_ref().filter(|(same, plan)| *same == asked && plan.host_bytes() <= limits.host)
        {
            return Ok(known.clone());
        }
        let load_bytes = weights::load_bytes(&*self.on.device, self.on.network(job.direction));
        let plan = self.on.plan(job, limits, load_bytes, &self.target(cancel)?)?;
        *planned = Some((asked, plan.clone()));
        Ok(plan)
    }

    /// Tiles make results inexact without being asked for, so the host is told.
    fn warn_if_tiled(&self, plan: &PlanReport, control: &Control) {
        if !plan.is_tiled() {
            return;
        }
        let (node, (rows, columns)) = (plan.direction.name(), plan.tiles);
        let why = if self.on.settings.tiling[plan.direction as usize].enabled {
            format!("{node}_tiled asks for it")
        } else {
            "the whole image does not fit in memory_limit; raise that, or set tiles to never to fail".into()
        };
        control.warn(format_args!("{node} in {rows} x {columns} tiles, which is not exact: {why}"));
    }

    /// The host asked for more than is planned.
    fn warn_if_slice_is_shorter(&self, control: &Control) {
        if let Some(asked) = self.on.settings.slice_frames.filter(|asked| *asked > MAX_SLICE_LATENTS) {
            control.warn(format_args!(
                "slice_frames: {asked} is more than a slice can have; {MAX_SLICE_LATENTS} latent frames are taken"
            ));
        }
    }

    /// Loads the weights of a plan and allocates its memory. If others took memory since it was planned, the job is
    /// planned again for what is left.
    pub(super) fn make_ready(&mut self, job: &Job, mut plan: Plan, control: &Control) -> Result<ReadyJob<B>> {
        let direction = job.direction;
        self.warn_if_slice_is_shorter(control);
        for note in std::mem::take(&mut *self.notes.lock()) {
            let level = if note.is_warning { LogLevel::Warning } else { LogLevel::Info };
            control.log.log(level, format_args!("{}", note.text));
        }
        loop {
            let report = self.report(&plan);
            control.log.log(LogLevel::Debug, format_args!("{report}"));
            self.make_room(direction, &plan);
            match self.load_weights_and_workspace(direction, &plan, control) {
                Ok(workspace) => {
                    self.warn_if_tiled(&report, control);
                    let weights = self.weights[direction as usize].clone();
                    // They are used from now on.
                    self.tell_idle();
                    return Ok(ReadyJob {
                        on: Arc::clone(&self.on),
                        place: self.place,
                        weights: weights.ok_or_else(|| Error::Internal("weights were not loaded".into()))?,
                        workspace,
                        schedule: plan.schedule(&self.target(control.cancel)?),
                        buffers: plan.buffers(),
                        report,
                        auto: self.auto,
                        traced: Vec::new(),
                    });
                }
                Err(Error::Memory(why)) if !B::HOST_MEMORY => {
                    let left = self.on.device.free_bytes().saturating_add(self.ledger.idle());
                    // At least a little less each time, as what is free may not be in one piece.
                    let device = left.min(plan.device_bytes() / 16 * 15);
                    control.warn(format_args!("{why}; planning again with {}", Bytes(device)));
                    plan = self.find_plan(job, PlanLimits { device, ..self.limits() }, control.cancel)?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Frees what the last call kept and this one cannot use: a workspace of another size, weights of which others are
    /// offloaded, and the weights of the other direction if both do not fit.
    fn make_room(&mut self, direction: Direction, plan: &Plan) {
        let limits = self.limits();
        self.workspace = self.workspace.take().filter(|kept| kept.fits(plan));
        let own = &mut self.weights[direction as usize];
        *own = own.take().filter(|share| share.key.offloaded == plan.offloaded_weights());
        let other = &mut self.weights[1 - direction as usize];
        let both_fit = |share: &Arc<SharedWeights<B>>| {
            share.held.device.saturating_add(plan.device_bytes()) <= limits.device
                && share.held.host.saturating_add(plan.host_bytes()) <= limits.host
        };
        *other = other.take().filter(both_fit);
        self.tell_idle();
    }

    /// The weights, and the workspace of the last call, if [`Engine::make_room`] found it to fit, else a new one.
    /// Pinning host memory takes as long as packing weights, so both go on at the same time.
    fn load_weights_and_workspace(
        &mut self,
        direction: Direction,
        plan: &Plan,
        control: &Control,
    ) -> Result<Workspace<B>> {
        let (is_new, on, ledger) = (self.workspace.is_none(), Arc::clone(&self.on), Arc::clone(&self.ledger));
        let allocate = || on.with_threads(|| Workspace::allocate(&*on.device, &ledger, plan));
        let mut loaded = Ok(());
        let load = || loaded = self.load_weights(direction, &plan.offloaded_weights(), control);
        let allocated =
            at_once(vec![(); usize::from(is_new && plan.pinned().total() > 0)], |()| allocate(), load).pop();
        loaded?;
        // What no thread could allocate is allocated now.
        let workspace = self.workspace.take().map(Ok).or(allocated.and_then(Result::ok)).unwrap_or_else(allocate)?;
        if is_new && self.on.device.is_pageable(&workspace.memory) {
            warn_not_pinned(control, workspace.host.offloaded);
        }
        Ok(workspace)
    }
}
