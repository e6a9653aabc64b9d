//! The members of a fleet together: their settings, and the plan and the run of a job. Must not know streams.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::{Mutex, MutexGuard};

use super::assign;
use super::job::FleetJob;
use super::member::{self, Member};
use super::run::{self, Meter, Work};
use crate::error::{Error, Result};
use crate::exec::check::TensorCheck;
use crate::exec::device_model::latent_maps;
use crate::exec::ledger::{Ledger, Sharing};
use crate::exec::runner::Watch;
use crate::exec::settings::Settings;
use crate::exec::{Call, Control, DeviceSession, Opening, Outputs, Timelines};
use crate::ir::TensorDevice;
use crate::model::checkpoint::CheckpointFile;
use crate::model::{Direction, Network};
use crate::report::PlanReport;

/// The members, and the settings that they have now.
pub struct Fleet {
    pub members: Vec<Member>,
    file: CheckpointFile,
    networks: [Arc<Network>; 2],
    pub settings: Settings,
    /// Whether all members have them. One may have refused others.
    has_settings: bool,
    /// The sum of theirs, and what streams hold.
    pub ledger: Arc<Ledger>,
}

fn member_settings(settings: &Settings, places: &[TensorDevice], index: usize) -> Settings {
    let limits = &settings.memory_limit;
    let mut own = Settings { memory_limit: vec![*limits.get(index).unwrap_or(&limits[0])], ..settings.clone() };
    if places[index] == TensorDevice::Cpu {
        // Members on the CPU share its cores.
        let sharing = places.iter().filter(|place| **place == TensorDevice::Cpu).count() as u64;
        let cores = || std::thread::available_parallelism().map_or(1, usize::from) as u64;
        own.threads = Some((settings.threads.unwrap_or_else(cores) / sharing).max(1));
    }
    own
}

impl Fleet {
    pub fn new(mut sessions: Vec<Box<dyn DeviceSession>>, opening: &Opening) -> Result<Fleet> {
        let (file, settings) = (opening.checkpoint.file(), opening.settings.clone());
        let of_devices: Vec<_> = sessions.iter().map(|session| (session.place(), session.ledger())).collect();
        let ledger = Arc::new(Ledger::sum(of_devices.iter().map(|(_, ledger)| Arc::clone(ledger)).collect()));
        for session in &mut sessions {
            let same = of_devices.iter().filter(|(place, _)| *place == session.place());
            let device = same.map(|(_, ledger)| Arc::clone(ledger)).collect();
            session.share(Sharing { device, handle: Arc::clone(&ledger) });
        }
        let [encode, decode] = Direction::ALL.map(|direction| Network::new(&file.model, direction).map(Arc::new));
        let members = sessions.into_iter().map(Member::new).collect();
        let networks = [encode?, decode?];
        let mut fleet = Fleet { members, file, networks, settings, has_settings: false, ledger };
        fleet.apply(&opening.settings)?;
        Ok(fleet)
    }

    pub fn network(&self, direction: Direction) -> &Arc<Network> {
        &self.networks[direction as usize]
    }

    fn places(&self) -> Vec<TensorDevice> {
        self.members.iter().map(|member| member.session.place()).collect()
    }

    /// What the tensors of a call or a stream are checked against.
    pub fn check(&self, direction: Direction) -> TensorCheck {
        TensorCheck { network: Arc::clone(self.network(direction)), places: self.places() }
    }

    /// The fleet with these settings. The session and its streams ask with their own before they work, so settings that
    /// a failure leaves half applied are replaced before any work.
    pub fn locked<'a>(fleet: &'a Mutex<Fleet>, settings: &Settings) -> Result<MutexGuard<'a, Fleet>> {
        let mut fleet = fleet.lock();
        fleet.apply(settings)?;
        Ok(fleet)
    }

    /// Gives every member its settings.
    fn apply(&mut self, settings: &Settings) -> Result<()> {
        if self.has_settings && self.settings == *settings {
            return Ok(());
        }
        self.has_settings = false;
        let places = self.places();
        for (index, member) in self.members.iter_mut().enumerate() {
            member.session.configure(member_settings(settings, &places, index))?;
        }
        // Latents may be packed.
        let packing = latent_maps(settings, &self.file)?.packing;
        self.networks.iter_mut().for_each(|network| Arc::make_mut(network).geometry.packing = packing);
        (self.settings, self.has_settings) = (settings.clone(), true);
        Ok(())
    }

    /// Whether `precision=auto` has become bf16 on some member.
    pub fn has_left_fp16(&self) -> bool {
        self.members.iter().any(|member| member.session.has_left_fp16())
    }

    /// Where `precision=auto` has become bf16 on some members, it becomes so on all that compute in fp16.
    fn leave_fp16_together(&mut self) -> Result<()> {
        if !self.has_left_fp16() {
            return Ok(());
        }
        for member in self.members.iter_mut().filter(|member| member.is_able()) {
            match member.session.leave_fp16() {
                Err(error) if member::is_of_device(&error) => member.leave_out(error),
                left => left?,
            }
        }
        Ok(())
    }

    /// Begins a call. Whether devices are mixed, which has to be allowed.
    fn begin(&mut self) -> Result<bool> {
        self.members.iter_mut().for_each(|member| member.begin(false));
        if !self.members.iter().any(Member::is_able) {
            self.members.iter_mut().for_each(|member| member.begin(true));
        }
        self.leave_fp16_together()?;
        let able = self.members.iter().filter(|member| member.is_able());
        let kinds: Vec<_> = able.map(|m| (m.session.place(), m.session.plan_kind().arithmetic)).collect();
        let Some((other, kind)) = kinds.iter().find(|(_, kind)| *kind != kinds[0].1) else { return Ok(false) };
        if self.settings.mixed_devices {
            return Ok(true);
        }
        Err(Error::Device(format!(
            "device: {} ({}) and {other} ({kind}) do not give the same bits; use devices of one kind, or set \
             mixed_devices to allow",
            kinds[0].0, kinds[0].1
        )))
    }

    /// `timelines`: gets that of each member's first part.
    pub fn plan(&mut self, job: &FleetJob, timelines: Timelines, cancel: &AtomicBool) -> Result<PlanReport> {
        let mixed = self.begin()?;
        assign::assign(&mut self.members, job, &job.whole, cancel)?;
        if let Some(timelines) = timelines {
            for member in &self.members {
                let first = member.todo.first().map(|first| job.shape(&first.part));
                first.map(|first| member.session.plan(&first, Some(&mut *timelines), cancel)).transpose()?;
            }
        }
        assign::report(&self.members, job, mixed)
    }

    pub fn run(&mut self, job: &FleetJob, call: &Call, control: &mut Control) -> Result<PlanReport> {
        let (mixed, mut todo) = (self.begin()?, vec![job.whole.clone()]);
        Watch::new(control, "plan", 0).advance(0)?;
        let mut meter = Meter::new(control, job);
        while let Some(part) = todo.pop() {
            let control = &mut *meter.watch.control;
            assign::assign(&mut self.members, job, &part, control.cancel)?;
            self.warn_left_out(control);
            if part == job.whole {
                Watch::new(control, "load", 0).advance(0)?;
            }
            let work = Work { job, call, cancel: control.cancel };
            run::run(&mut self.members, work, &mut meter)?;
            // Those of a member that failed come back.
            let left = self.members.iter_mut().flat_map(|member| member.todo.drain(..));
            todo.extend(left.map(|planned| planned.part));
            self.warn_left_out(meter.watch.control);
        }
        meter.finish()?;
        assign::report(&self.members, job, mixed)
    }

    /// Tells the host of members that failed.
    fn warn_left_out(&mut self, control: &Control) {
        for member in &mut self.members {
            if let Some(why) = member.news.take() {
                let place = member.session.place();
                control.warn(format_args!("{place} failed, so the other devices do its part: {why}"));
            }
        }
    }
}

/// Work of several devices cannot be ordered on one CUDA stream.
pub fn refuse_stream(into: &Outputs) -> Result<()> {
    if into.stream.is_some() {
        let text = "run: VVAE_RUN_HAS_STREAM is for one device, but this handle has several; leave it out";
        return Err(Error::Argument(text.into()));
    }
    Ok(())
}
