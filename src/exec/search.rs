//! From a job and settings to a plan, or to the words that say why there is none. Must not run anything.

use std::sync::Arc;

use super::device_model::DeviceModel;
use super::settings::{Settings, Tiling};
use super::{Extent, JobShape, check};
use crate::backend::DeviceFacts;
use crate::error::{Error, Result};
use crate::ir::Shape;
use crate::model::{Cone, Direction, Network};
use crate::plan::{self, Plan, PlanError, Request, Spacing, Target, TileSize};
use crate::report::{Bytes, PlanLimits};
use crate::reserve;

/// What is to be run.
#[derive(Clone, PartialEq)]
pub struct Job {
    pub direction: Direction,
    /// Of what goes in; 0 frames for a stream.
    pub input: Shape,
    pub cone: Arc<Cone>,
}

impl Job {
    /// The job of this shape, with the input that it needs.
    pub fn new(network: &Network, shape: &JobShape) -> Result<Job> {
        let JobShape { direction, input, extent } = *shape;
        let cone = check::job(network, shape)?;
        let frames = match extent {
            Extent::Clip => input.frames,
            Extent::Range(range) => cone.inputs(range.clip_frames).count() as u64,
            Extent::Stream { .. } => 0,
        };
        Ok(Job { direction, input: Shape { frames, ..input }, cone: Arc::new(cone) })
    }

    /// What the settings ask for.
    fn request(&self, network: &Arc<Network>, settings: &Settings, limits: PlanLimits, load_bytes: u64) -> Request {
        let Tiling { enabled, size, overlap } = settings.tiling[self.direction as usize];
        let asked = TileSize { height: size, width: size, overlap, spacing: Spacing::Strided };
        Request {
            network: Arc::clone(network),
            cone: Arc::clone(&self.cone),
            batch: self.input.batch,
            frames: self.input.known_frames(),
            image: self.input.into(),
            limit: limits.device,
            host_limit: limits.host,
            load_bytes,
            allow_tiles: settings.allow_tiles,
            tiles: enabled.then_some(asked),
            overlap,
            slice: settings.slice_frames,
            chunk: settings.chunk_frames,
        }
    }
}

impl<D: DeviceFacts> DeviceModel<D> {
    /// The plan of a job within these limits. `load_bytes`: what loading the weights takes.
    pub fn plan(&self, job: &Job, limits: PlanLimits, load_bytes: u64, target: &Target) -> Result<Plan> {
        reserve::check()?;
        let request = job.request(self.network(job.direction), &self.settings, limits, load_bytes);
        check_tiling(job, &request, &self.settings)?;
        self.with_threads(|| plan::search(&request, target)).map_err(|why| match why {
            PlanError::TooLarge { smallest, smallest_exact } => too_large(job, &request, smallest, smallest_exact),
            PlanError::Cancelled => target.check_cancel().err().unwrap_or_else(reserve::exhausted),
        })
    }
}

fn check_tiling(job: &Job, request: &Request, settings: &Settings) -> Result<()> {
    let tiling = settings.tiling[request.network.direction as usize];
    let (size, overlap, node) = (tiling.size, tiling.overlap, request.network.direction.name());
    if tiling.enabled && overlap >= size {
        return Err(Error::Argument(format!(
            "{node}_tile_overlap: {overlap} must be less than {node}_tile_size, which is {size}"
        )));
    }
    if request.has_too_many_tiles() {
        return Err(Error::Argument(format!(
            "{node}_tile_size: {size} with {node}_tile_overlap {overlap} cuts {} into too many tiles; use larger tiles \
             or less overlap",
            job.input.described()
        )));
    }
    Ok(())
}

/// `tiled` and `exact`: the smallest plans, if any is within the limit of host memory.
fn too_large(job: &Job, request: &Request, tiled: Option<u64>, exact: Option<u64>) -> Error {
    let (limit, input) = (Bytes(request.limit), job.input.described());
    let takes = |bytes: Option<u64>| match bytes {
        Some(bytes) => format!("takes {} ({bytes} bytes)", Bytes(bytes)),
        None => "needs more host memory than host_memory_limit allows".into(),
    };
    Error::Memory(if request.allow_tiles {
        let whole = exact.map_or(String::new(), |bytes| format!(", and {} without tiles", Bytes(bytes)));
        format!(
            "memory_limit: {limit} is too little for {input}; the smallest plan, with the smallest tiles, {}{whole}. \
             Raise memory_limit, or use smaller frames or fewer of them",
            takes(tiled)
        )
    } else {
        format!(
            "memory_limit: {limit} is too little for {input} without tiles; the smallest exact plan {}. Raise \
             memory_limit, or set tiles to auto, which is not exact",
            takes(exact)
        )
    })
}
