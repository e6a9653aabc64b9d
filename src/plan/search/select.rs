//! Selects the fastest policy of those that differ in time and memory only: the whole image, or tiles of one size.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::candidates::{
    MAX_PLANNED_SLICE, all_offloaded, banded_policies, can_stream_outputs, fewer_hidden, hidden_stage, offload_costs,
    rematerialising_stage, without_caches,
};
use crate::ir::{DeviceProfile, FrameShape, LayerId, Rates};
use crate::model::Network;
use crate::plan::cost::{Target, fetchable_weights};
use crate::plan::plan::Plan;
use crate::plan::policy::{CACHE_FRAMES, Memory, Placement, SchedulePolicy};
use crate::plan::request::Request;
use crate::plan::spec::{ItemOrder, ScheduleSpec};
use crate::plan::tiles::Grid;
use crate::thread_pool;

/// Policies that are looked at closely, of those with the same frames at full resolution: all, materialised, and
/// materialised hidden ones. On the corpus (2026-11-16) three were 1.02 faster than two and 1.22 faster than one; five
/// since more sets compete (2026-11-18).
const MAX_PROMISING: usize = 5;
/// Plans that are packed per pass to see whether they fit. Most fit at the first or second try; more would not end
/// within a second (`planner_grid`).
const MAX_PACKED: usize = 8;
/// A pass takes plans whose lower bound is below this share of the limit; the last one takes what is left. Without the
/// passes of 0.94 and 0.86 one job of the corpus is 2.66 times as slow (2026-11-16).
const LIMIT_SHARES: [f64; 4] = [1.0, 0.94, 0.86, 1.0];
/// Work items times latent frames of a slice whose rehearsals are short enough for a whole search: those of even tiles,
/// of which three are rehearsed, in the longest slices that are tried.
const SHORT_REHEARSAL: u64 = 3 * MAX_PLANNED_SLICE;
/// Layers of the largest network that is published. Rehearsals of deeper ones take longer, and a search makes more of
/// them.
const USUAL_LAYERS: u64 = 64;
/// Rehearsals that are longer by this factor leave no time for a search: only resident and smallest policies are tried.
/// Set by hand so that every search ends within a second (`planner_grid`).
const MAX_EFFORT: usize = 16;
/// Tries that follow an estimate of bytes before a search bisects. Three suffice where slots are pooled: one anywhere,
/// one where the limit should be, one beside it.
const MAX_GUESSES: usize = 4;
/// Weights below this fraction of the limit are not worth a second search. Set by hand: 2.5 % of the limit.
const MIN_WEIGHTS: u64 = 40;
/// Plans whose times differ by less are equally fast. Estimates are off by several times as much (docs/planner.md).
const TIME_STEP: f64 = 0.005;
/// A plan that waits longer for its weights, as a share of its time, may be slower than one with all weights resident.
const MAX_WEIGHT_WAIT: f64 = TIME_STEP;

/// More columns of a layer's cache on the device, and the seconds that a byte of them saves.
#[derive(Clone, Copy)]
struct ResidencyStep {
    gain: f64,
    layer: LayerId,
    resident_shares: u8,
}

/// Time in steps of [`TIME_STEP`], then bytes: of equally fast plans the smallest comes first.
type Rank = (i64, u64);

fn rank(plan: &Plan) -> Rank {
    ((plan.estimate.seconds.max(1e-9).ln() / (1.0 + TIME_STEP).ln()) as i64, plan.device_bytes())
}

#[derive(Clone)]
pub struct Search<'a> {
    pub request: &'a Request,
    /// The request's, or less for a policy whose packed plan turned out larger than its lower bound.
    pub limit: u64,
    pub grid: Option<Arc<Grid>>,
    /// The layers whose weights are offloaded.
    pub offloaded_weights: Arc<[LayerId]>,
    pub target: Target<'a>,
    pub smallest: &'a Mutex<Smallest>,
}

/// The smallest plans rehearsed so far: without tiles, and with tiles.
#[derive(Default)]
pub struct Smallest {
    pub exact: Option<Plan>,
    pub tiled: Option<Plan>,
}

impl Smallest {
    /// Threads record theirs in any order, so of plans of equal bytes the one with the greater policy stays.
    fn record(&mut self, plan: &Plan) {
        let known = if plan.is_untiled() { &mut self.exact } else { &mut self.tiled };
        let smaller = |than: &Plan| (plan.device_bytes(), &than.spec.policy) < (than.device_bytes(), &plan.spec.policy);
        if known.as_ref().is_none_or(smaller) {
            *known = Some(plan.clone());
        }
    }
}

impl<'a> Search<'a> {
    /// The same with weights offloaded, if that makes room.
    fn offloading_weights(&self) -> Search<'a> {
        let network = &self.request.network;
        let fetchable = fetchable_weights(network, &self.target);
        let bytes = fetchable.iter().map(|layer| self.target.sizes.weight_bytes(&network.layers[*layer].layout));
        let makes_room = bytes.sum::<u64>() >= self.limit / MIN_WEIGHTS;
        let offloaded = if makes_room { fetchable.into() } else { Arc::default() };
        Search { offloaded_weights: offloaded, ..self.clone() }
    }

    /// What is found with offloaded weights, which takes the least device memory; or without, if host memory is short.
    pub fn anywhere(&self, find: impl Fn(&Search<'a>) -> Option<Plan>) -> Option<Plan> {
        find(&self.offloading_weights()).or_else(|| find(self))
    }

    /// The fastest plan, with weights resident or offloaded.
    pub fn fastest_anywhere(&self, policies: &[Arc<SchedulePolicy>]) -> Option<Plan> {
        let offloading = self.offloading_weights();
        if offloading.offloaded_weights == self.offloaded_weights {
            return self.fastest(policies);
        }
        let found = offloading.fastest(policies);
        // Offloaded weights leave more room. A plan that does not wait for them loses nothing.
        if found.as_ref().is_some_and(|found| found.weight_wait_share() < MAX_WEIGHT_WAIT) {
            return found;
        }
        let both = [found, self.fastest(policies)].into_iter().flatten();
        both.min_by(|a, b| a.estimate.seconds.total_cmp(&b.estimate.seconds))
    }

    /// How many times as long as usual a rehearsal takes. A search tries fewer policies by that factor, so that it
    /// ends in time; it depends on the request only, so that the plan does too.
    pub fn effort(&self) -> usize {
        let tiles = match &self.grid {
            None => 1,
            Some(grid) if grid.is_uniform() => 3.min(grid.tiles()),
            // Of rows and of columns, the first, the second and the last are rehearsed.
            Some(grid) => 9.min(grid.tiles()),
        };
        let clips = if self.request.frames.is_none() && self.request.batch > 1 { 2 } else { 1 };
        let latents = self.request.slice_latents().unwrap_or(MAX_PLANNED_SLICE);
        let layers = (self.request.network.layers.len() as u64).div_ceil(USUAL_LAYERS);
        (tiles as u64 * clips * latents * layers * layers).div_ceil(SHORT_REHEARSAL) as usize
    }

    /// Whether all output frames of a clip fit. Item by item, they are kept until the last tile.
    fn output_fits(&self) -> bool {
        let network = &self.request.network;
        let frame = self.target.frame_bytes(network.output_shape(self.request.input_frame()));
        let frames = self.request.input_end().map_or(0, |end| self.request.cone.output_frames(network, end));
        frame.saturating_mul(frames) <= self.limit
    }

    /// The specs that a policy can run as.
    fn specs(&self, policy: &Arc<SchedulePolicy>) -> Vec<ScheduleSpec> {
        let mut policy = Arc::clone(policy);
        for layer in &*self.offloaded_weights {
            Arc::make_mut(&mut policy).layers[*layer].weights = Memory::Host;
        }
        let orders: &[ItemOrder] = match &self.grid {
            _ if self.request.frames.is_none() => &[ItemOrder::SliceBySlice],
            None => &[ItemOrder::ItemByItem],
            Some(_) => &[ItemOrder::ItemByItem, ItemOrder::SliceBySlice],
        };
        let spec = |order: &ItemOrder| self.request.spec(Arc::clone(&policy), self.grid.clone(), *order);
        orders.iter().map(spec).collect()
    }

    /// The first policy that fits.
    pub fn first_packed(&self, policies: &[Arc<SchedulePolicy>]) -> Option<Plan> {
        let mut specs = policies.iter().flat_map(|policy| self.specs(policy));
        specs.find_map(|spec| {
            let found = self.rehearsed(spec).filter(|found| self.fits(found))?;
            Some(found.packed(&self.target)).filter(|packed| self.fits(packed))
        })
    }

    /// The fastest of `policies` and of the banded policies, each with as much of the caches resident as fits.
    fn fastest(&self, policies: &[Arc<SchedulePolicy>]) -> Option<Plan> {
        let best = self.first_packed(policies);
        if !self.target.profile.offloads {
            return best;
        }
        let effort = self.effort();
        if effort > MAX_EFFORT {
            return best.or_else(|| self.smallest_banded(policies));
        }
        let found = thread_pool::map(self.promising_policies(effort), |policy| {
            self.most_resident(&policy).map(|plan| (plan, policy))
        });
        let mut found: Vec<(Plan, SchedulePolicy)> = found.into_iter().flatten().collect();
        let faster = |plan: &Plan| best.as_ref().is_none_or(|best| plan.estimate.seconds < best.estimate.seconds);
        // Packed plans exceed their lower bound. If none of the fastest fits, one may that leaves some room.
        for share in LIMIT_SHARES {
            let roomy = |plan: &Plan| plan.device_bytes() as f64 <= self.limit as f64 * share;
            for _ in 0..MAX_PACKED.div_ceil(effort) {
                let candidates = (0..found.len()).filter(|i| faster(&found[*i].0) && roomy(&found[*i].0));
                let Some(fastest) = candidates.min_by_key(|i| rank(&found[*i].0)) else { break };
                let (plan, policy) = found.swap_remove(fastest);
                let bound = plan.device_bytes();
                let packed = plan.packed(&self.target);
                if self.fits(&packed) {
                    return Some(packed);
                }
                // The same policy with less of its caches resident may fit.
                let limit = (self.limit as f64 * bound as f64 / packed.device_bytes() as f64 * 0.995) as u64;
                let smaller = Search { limit, ..self.clone() }.most_resident(&policy);
                found.extend(smaller.map(|plan| (plan, policy)));
            }
        }
        best.or_else(|| self.smallest_banded(policies))
    }

    /// The last of `policies`, which takes the fewest frames at a time, with no cache resident and everything
    /// rematerialised that can be.
    fn smallest_banded(&self, policies: &[Arc<SchedulePolicy>]) -> Option<Plan> {
        let one = policies.last().expect("there is always one");
        let stage = rematerialising_stage(self.request, &self.target);
        let rematerialising = stage.map(|stage| one.with_materialised(&self.request.network, stage, 0));
        let policies = [Some(SchedulePolicy::clone(one)), rematerialising].into_iter().flatten();
        let policies = policies.map(|policy| Arc::new(all_offloaded(self.request, &policy, &self.target)));
        self.first_packed(&policies.collect::<Vec<_>>())
    }

    fn fits(&self, plan: &Plan) -> bool {
        plan.fits(self.limit, self.request.host_limit)
    }

    /// The first order of a policy whose lower bound fits, else the last one; `None` if the search is cancelled.
    fn first_that_fits(&self, policy: SchedulePolicy) -> Option<Plan> {
        let whole_output = self.grid.is_none() || self.output_fits();
        let mut specs = self.specs(&Arc::new(policy));
        specs.retain(|spec| whole_output || spec.order == ItemOrder::SliceBySlice);
        let mut tried = None;
        for spec in specs {
            let plan = tried.insert(self.rehearsed(spec)?);
            if self.fits(plan) {
                break;
            }
        }
        tried
    }

    /// The lower bound of a spec; `None` if the search is cancelled.
    fn rehearsed(&self, spec: ScheduleSpec) -> Option<Plan> {
        if self.target.is_cancelled() {
            return None;
        }
        let found = Plan::rehearse(self.request, spec, &self.target);
        if found.host_bytes() <= self.request.host_limit {
            self.smallest.lock().record(&found);
        }
        Some(found)
    }

    /// Of policies with the same frames at full resolution, keeps the fastest that fit with every cache offloaded. Each
    /// has variants with fewer materialised frames, which leave more room for caches.
    fn promising_policies(&self, effort: usize) -> Vec<SchedulePolicy> {
        let network = &*self.request.network;
        let stage = rematerialising_stage(self.request, &self.target);
        let hidden = hidden_stage(self.request, &self.target);
        let banded = banded_policies(self.request, &self.target.profile).into_iter().step_by(effort);
        let banded = banded.flat_map(|policy| fewer_hidden(policy, network, hidden));
        let found = thread_pool::map(banded.collect(), |policy| self.most_materialised(policy, stage));
        let full = network.largest_stage();
        let mut by_frames: BTreeMap<[u64; 3], Vec<(Rank, SchedulePolicy)>> = BTreeMap::new();
        for (rank, policy) in found.into_iter().flatten() {
            let rematerialised = [0, policy.rematerialised_hidden(network, full), policy.rematerialised(network, full)];
            let frames = rematerialised.map(|rematerialised| policy.chunks[full] - rematerialised);
            by_frames.entry(frames).or_default().push((rank, policy));
        }
        by_frames
            .into_values()
            .flat_map(|policies| fastest_and_smaller(policies, MAX_PROMISING.div_ceil(effort)))
            .flat_map(|policy| fewer_materialised(policy, network, stage))
            .collect()
    }

    /// A policy with as many materialised frames of `stage` as fit with every cache offloaded, and its rank.
    fn most_materialised(&self, policy: SchedulePolicy, stage: Option<usize>) -> Option<(Rank, SchedulePolicy)> {
        let network = &*self.request.network;
        let tried = |policy: &SchedulePolicy| self.first_that_fits(without_caches(self.request, policy, &self.target));
        let all = Some(tried(&policy)?).filter(|all| self.fits(all));
        let (Some(stage), None) = (stage, &all) else { return all.map(|found| (rank(&found), policy)) };
        let with = |frames: usize| tried(&policy.with_materialised(network, stage, frames as u64));
        let none = Some(with(0)?).filter(|none| self.fits(none))?;
        let head = network.stages[stage].head();
        let input = network.input_shapes(self.request.input_frame())[head];
        let frame = self.target.frame_bytes(network.layers[head].output_shape(input));
        let most = policy.chunks[stage] as usize - 1;
        let fit = Fit { search: self, most, bytes: &|frames| frame.saturating_mul(frames as u64) };
        let (frames, found) = fit.most(Some((0, none.device_bytes())), with);
        let policy = policy.with_materialised(network, stage, frames as u64);
        Some((rank(&found.unwrap_or(none)), policy))
    }

    /// A policy with all layers in bands, and as much of the caches resident as fits: first of the layers that would
    /// wait longest, and no more than keeps them from waiting.
    fn most_resident(&self, policy: &SchedulePolicy) -> Option<Plan> {
        let policy = without_caches(self.request, policy, &self.target);
        let steps = self.residency_steps(&policy);
        let (mut of_layer, mut of_steps) = (vec![0; policy.layers.len()], vec![0]);
        for step in &steps {
            let bytes = self.resident_bytes(step.layer, step.resident_shares);
            of_steps.push(of_steps[of_steps.len() - 1] + bytes - std::mem::replace(&mut of_layer[step.layer], bytes));
        }
        let fit = Fit { search: self, most: steps.len(), bytes: &|count| of_steps[count] };
        let with = |count: usize| {
            let mut policy = policy.clone();
            for ResidencyStep { layer, resident_shares, .. } in steps[..count].iter().copied() {
                policy.layers[layer].cache = Placement::Columns { resident_shares };
            }
            self.first_that_fits(policy)
        };
        fit.most(None, with).1.or_else(|| with(0).filter(|none| self.fits(none)))
    }

    /// About what the resident columns of a layer's cache take.
    fn resident_bytes(&self, layer: LayerId, resident_shares: u8) -> u64 {
        let network = &self.request.network;
        let input = network.input_shapes(self.request.input_frame())[layer];
        let columns = Placement::Columns { resident_shares }.columns(input.width, self.target.profile.column_step);
        let part = FrameShape { width: columns.resident_width(), ..input };
        CACHE_FRAMES * self.target.cached_bytes(part, network.layers[layer].cache)
    }

    /// Steps of residency, one share of a row each, those first that save the most seconds for their bytes.
    fn residency_steps(&self, policy: &SchedulePolicy) -> Vec<ResidencyStep> {
        const SHARES: f64 = Placement::SHARES as f64;
        let DeviceProfile { column_step, rates: Rates { copy_contention: contention, .. }, .. } = self.target.profile;
        let shapes = self.request.network.input_shapes(self.request.input_frame());
        let mut steps: Vec<ResidencyStep> = Vec::new();
        for cost in offload_costs(self.request, policy, &self.target) {
            let (layer, bytes) = (cost.layer, cost.bytes);
            let mut add = |gain: f64, resident_shares: u8| steps.push(ResidencyStep { gain, layer, resident_shares });
            if policy.layers[layer].cache == Placement::Recomputed {
                add(cost.recomputed / bytes, Placement::SHARES);
                continue;
            }
            // Resident columns are copied within the device; the rest can move during that time.
            let waiting = cost.offloaded / ((1.0 - contention) * cost.moving + cost.copying);
            let shares = Placement::shares_for(waiting, shapes[layer].width, column_step);
            let resident = f64::from(shares) / SHARES;
            if shares > 0 {
                add((cost.offloaded - cost.copying * resident) / (bytes * resident), shares);
                // More than that only reduces copy contention.
                add((contention * cost.moving - cost.copying) / bytes, Placement::SHARES);
            }
        }
        steps.retain(|step| step.gain > 0.0);
        steps.sort_by(|a, b| b.gain.total_cmp(&a.gain));
        let mut resident = vec![0; policy.layers.len()];
        let shares = steps.into_iter().flat_map(|step| {
            let fewer = std::mem::replace(&mut resident[step.layer], step.resident_shares);
            // A cache is recomputed whole or not at all.
            let first = if policy.layers[step.layer].cache == Placement::HOST { fewer + 1 } else { Placement::SHARES };
            (first..=step.resident_shares).map(move |resident_shares| ResidencyStep { resident_shares, ..step })
        });
        shares.collect()
    }

    /// A still image in bands, with as few outputs offloaded as fits, the largest first.
    pub fn offloaded_still(&self) -> Option<Plan> {
        if !self.request.is_still() || !self.target.profile.offloads {
            return None;
        }
        let network = &*self.request.network;
        let shapes = network.input_shapes(self.request.input_frame());
        let can = |layer: &LayerId| can_stream_outputs(self.request, *layer, &self.target);
        let bytes = |layer: LayerId| self.target.frame_bytes(network.layers[layer].output_shape(shapes[layer]));
        let mut order: Vec<(u64, LayerId)> =
            (0..network.layers.len()).filter(can).map(|layer| (bytes(layer), layer)).collect();
        order.sort_by(|a, b| b.cmp(a));
        let one = SchedulePolicy::resident(network, network.latent_rate(), vec![1; network.stages.len()]);
        let mut policy = all_offloaded(self.request, &one, &self.target);
        order.into_iter().find_map(|(_, layer)| {
            policy.layers[layer].output = Memory::Host;
            self.first_packed(&[Arc::new(policy.clone())])
        })
    }
}

/// The fastest policies, without those that are slower and no smaller than another.
fn fastest_and_smaller(mut policies: Vec<(Rank, SchedulePolicy)>, most: usize) -> impl Iterator<Item = SchedulePolicy> {
    policies.sort_by_key(|(rank, _)| *rank);
    let mut least = None;
    policies.retain(|((_, bytes), _)| {
        let smaller = least.is_none_or(|least| *bytes < least);
        least = Some(least.map_or(*bytes, |least| (*bytes).min(least)));
        smaller
    });
    policies.truncate(most);
    policies.into_iter().map(|(_, policy)| policy)
}

fn fewer_materialised(policy: SchedulePolicy, network: &Network, stage: Option<usize>) -> Vec<SchedulePolicy> {
    let Some(stage) = stage else { return vec![policy] };
    let most = policy.chunks[stage] - policy.rematerialised(network, stage);
    let mut fewer = vec![most, most * 2 / 3, most / 3];
    fewer.dedup();
    fewer.into_iter().map(|frames| policy.with_materialised(network, stage, frames)).collect()
}

/// How much fits beside what fits without: up to `most` is tried.
struct Fit<'a> {
    search: &'a Search<'a>,
    most: usize,
    /// About what each number takes beside the rest.
    bytes: &'a dyn Fn(usize) -> u64,
}

impl Fit<'_> {
    /// Returns how many fit, and the plan with these. Each try tells where the next one should be: memory grows with
    /// the bytes that are resident. `known`: a number, and what it takes. Bisects if that leads nowhere.
    fn most(&self, known: Option<(usize, u64)>, with: impl Fn(usize) -> Option<Plan>) -> (usize, Option<Plan>) {
        let (mut fits, mut too_many, mut found, mut known) = (0, self.most + 1, None, known);
        let mut tries = 0;
        while fits + 1 < too_many {
            let middle = (fits + too_many) / 2;
            let guess = known.filter(|_| tries < MAX_GUESSES).map(|(at, bytes)| self.guess(at, bytes));
            let next = guess.unwrap_or(middle).clamp(fits + 1, too_many - 1);
            let tried = with(next);
            known = tried.as_ref().map(|tried| (next, tried.device_bytes()));
            tries += 1;
            match tried.filter(|tried| self.search.fits(tried)) {
                Some(more) => (found, fits) = (Some(more), next),
                None => too_many = next,
            }
        }
        (fits, found)
    }

    /// The most that should fit where `at` takes `bytes`.
    fn guess(&self, at: usize, bytes: u64) -> usize {
        let rest = bytes.saturating_sub((self.bytes)(at));
        let numbers: Vec<usize> = (0..=self.most).collect();
        let limit = self.search.limit;
        numbers.partition_point(|number| rest.saturating_add((self.bytes)(*number)) <= limit).saturating_sub(1)
    }
}
