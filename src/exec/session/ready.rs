//! From a shape to a plan with its weights loaded and its memory allocated.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::{Engine, warn_not_pinned};
use crate::backend::{Backend, host_memory};
use crate::error::{Error, Result};
use crate::exec::search::{self, HOST_MARGIN, Job, MARGIN};
use crate::exec::settings::Settings;
use crate::exec::weights::{self, SharedWeights};
use crate::exec::workspace::Workspace;
use crate::exec::{Control, LogLevel};
use crate::model::Direction;
use crate::plan::{MAX_SLICE_LATENTS, Plan, Request};
use crate::report::{Bytes, PlanLimits, PlanReport};
use crate::{reserve, thread_pool};

/// What a plan depends on, except free host memory.
#[derive(Clone, PartialEq)]
pub(super) struct Asked {
    job: Job,
    limit: u64,
    settings: Settings,
}

impl<B: Backend> Engine<B> {
    /// Runs `work` on as many threads as the host allows: the backend's own, if it computes with some.
    pub(super) fn with_threads<R>(&self, work: impl FnOnce() -> R) -> R {
        thread_pool::with_threads(self.backend.pool(), self.settings.threads, work)
    }

    /// Bytes that a job may take: all that this session holds already may be used again.
    pub(super) fn limit(&self) -> u64 {
        let free = self.sharing.device_bytes(self.backend.free_bytes(), &self.ledger);
        self.settings.memory_limit.first().map_or(free, |limit| limit.bytes(free, MARGIN))
    }

    /// The same for host memory beside the device's.
    pub(super) fn host_limit(&self) -> u64 {
        let pinned = self.workspace.as_ref().map_or(0, |kept| kept.host.total());
        let weights: u64 = self.idle_weights().map(|share| share.host_bytes()).sum();
        let idle = pinned + weights + self.backend.kept_host_bytes();
        self.sharing.host_bytes(self.settings.host_memory_limit, host_memory().1, HOST_MARGIN, &self.ledger, idle)
    }

    pub(super) fn find_plan(&self, job: &Job, limit: u64, cancel: &AtomicBool) -> Result<Plan> {
        reserve::check()?;
        let asked = Asked { job: job.clone(), limit, settings: self.settings.clone() };
        let mut planned = self.planned.lock();
        match &*planned {
            Some((same, found)) if *same == asked && found.host_bytes() <= self.host_limit() => Ok(found.clone()),
            _ => {
                let found = self.search(job, limit, cancel)?;
                *planned = Some((asked, found.clone()));
                Ok(found)
            }
        }
    }

    fn search(&self, job: &Job, limit: u64, cancel: &AtomicBool) -> Result<Plan> {
        let (request, target) = (self.request(job, limit), self.target(cancel)?);
        self.with_threads(|| search::search(&request, &self.settings, &target, cancel))
    }

    /// What the settings ask for, of a job within `limit`.
    pub(super) fn request(&self, job: &Job, limit: u64) -> Request {
        let network = &self.coder(job.direction).network;
        let limits = PlanLimits { device: limit, host: self.host_limit() };
        job.request(network, &self.settings, limits, weights::load_bytes(&*self.backend, network))
    }

    /// Tiles make results inexact without being asked for, so the host is told.
    pub(super) fn warn_if_tiled(&self, plan: &PlanReport, control: &Control) {
        if !plan.is_tiled() {
            return;
        }
        let (node, (rows, columns)) = (plan.direction.name(), plan.tiles);
        let why = if self.settings.tiling(plan.direction).enabled {
            format!("{node}_tiled asks for it")
        } else {
            "the whole image does not fit in memory_limit; raise that, or set tiles to never to fail".into()
        };
        control.warn(format_args!("{node} in {rows} x {columns} tiles, which is not exact: {why}"));
    }

    /// The host asked for more than is planned.
    fn warn_if_slice_is_shorter(&self, control: &Control) {
        if let Some(asked) = self.settings.slice_frames.filter(|asked| *asked > MAX_SLICE_LATENTS) {
            control.warn(format_args!(
                "slice_frames: {asked} is more than a slice can have; {MAX_SLICE_LATENTS} latent frames are taken"
            ));
        }
    }

    /// Loads the weights of a plan and allocates its memory. If others took memory since it was planned, the job is
    /// planned again for what is left.
    pub(super) fn make_ready(&mut self, job: &Job, mut plan: Plan, control: &Control) -> Result<(Plan, Workspace<B>)> {
        let direction = job.direction;
        self.warn_if_slice_is_shorter(control);
        for note in std::mem::take(&mut *self.notes.lock()) {
            let level = if note.is_warning { LogLevel::Warning } else { LogLevel::Info };
            control.log(level, format_args!("{}", note.text));
        }
        loop {
            let report = self.report(&plan);
            control.log(LogLevel::Debug, format_args!("{report}"));
            self.make_room(direction, &plan);
            let loaded = self.load_weights(direction, &plan.offloaded_weights(), control);
            match loaded.and_then(|()| self.take_workspace(&plan, control)) {
                Ok(workspace) => {
                    self.warn_if_tiled(&report, control);
                    return Ok((plan, workspace));
                }
                Err(Error::Memory(why)) if !B::HOST_MEMORY => {
                    let left = self.backend.free_bytes().saturating_add(self.ledger.idle());
                    // At least a little less each time, as what is free may not be in one piece.
                    let limit = left.min(plan.device_bytes() / 16 * 15);
                    control.warn(format_args!("{why}; planning again with {}", Bytes(limit)));
                    plan = self.find_plan(job, limit, control.cancel)?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Frees what the last call kept and this one cannot use: a workspace of another size, and the weights of the other
    /// direction if both do not fit.
    pub(super) fn make_room(&mut self, direction: Direction, plan: &Plan) {
        let (limit, host_limit) = (self.limit(), self.host_limit());
        self.workspace = self.workspace.take().filter(|kept| kept.fits(plan));
        // What other jobs have left may stay beside this one, or is taken by it.
        let wanted = if self.workspace.is_none() { plan.pinned().offloaded } else { 0 };
        self.backend.keep_host_bytes(host_limit.saturating_sub(plan.host_bytes()), wanted);
        let other = &mut self.coders[1 - direction as usize];
        let both_fit = |share: &Arc<SharedWeights<B>>| {
            share.bytes().saturating_add(plan.device_bytes()) <= limit
                && share.host_bytes().saturating_add(plan.host_bytes()) <= host_limit
        };
        other.weights = other.weights.take().filter(both_fit);
        self.tell_idle();
    }

    /// The workspace of the last call, if [`Engine::make_room`] found it to fit, else a new one.
    pub(super) fn take_workspace(&mut self, plan: &Plan, control: &Control) -> Result<Workspace<B>> {
        match self.workspace.take() {
            Some(kept) => Ok(kept),
            None => {
                let workspace = Workspace::allocate(&*self.backend, &self.ledger, plan)?;
                if self.backend.is_pageable(&workspace.memory) {
                    warn_not_pinned(control, workspace.host.offloaded);
                }
                Ok(workspace)
            }
        }
    }
}
