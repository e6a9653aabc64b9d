//! The ways to do a job whole, or in tiles of one size: how many frames at a time, and how much lies on the device.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::Request;
use crate::model::{Direction, LayerId};
use crate::plan::Costs;
use crate::plan::blueprint::Blueprint;
use crate::plan::cut::{Cut, Past, leavable, movable};
use crate::plan::job::Layout;
use crate::plan::tiles::Grid;
use crate::plan::weights::WeightBytes;
use crate::tensor::BandFrames;
use crate::workers;

/// Cuts that are looked at closely, for each number of frames at full resolution.
const MOST_PROMISING: usize = 3;
/// Ways that are packed to see whether they fit, of those that take no more than such a share of the limit at the least. Most do
/// at the first or second try.
const MOST_PACKED: usize = 8;
const SHARES: [f64; 3] = [1.0, 0.94, 0.86];

/// Weights of a smaller share of the limit are not worth a second search.
const LEAST_ROOM: u64 = 40;
/// A way that waits for its weights for more than this share of its time may be slower than one with all of them on the device.
const WORTH_A_LOOK: f64 = 0.005;

/// The time that a way takes, in steps of half a percent, and its bytes: of those that are as fast, the smallest comes first.
type Rank = (i64, u64);

fn rank(way: &Blueprint) -> Rank {
    ((way.seconds().max(1e-9).ln() / 1.005f64.ln()) as i64, way.device_bytes())
}

/// A search among ways that differ in nothing but time and memory.
#[derive(Clone)]
pub(super) struct Search<'a> {
    pub request: &'a Request,
    /// The request's, or less, for what is known to take more in the end than it seems to.
    pub limit: u64,
    pub grid: Option<Arc<Grid>>,
    /// Of each layer, whether its weights wait in host memory.
    pub weights_away: Arc<[bool]>,
    pub costs: &'a dyn Costs,
    pub sizes: &'a RefCell<Sizes>,
}

/// Keeps as much of the past on the device as fits.
type Keep = fn(&Search, &Cut) -> Option<Blueprint>;

/// A way that was found, and how.
struct Candidate {
    found: Blueprint,
    cut: Cut,
    keep: Keep,
}

/// The smallest ways that were met.
#[derive(Default)]
pub(super) struct Sizes {
    pub smallest: Option<Blueprint>,
    pub smallest_exact: Option<Blueprint>,
}

impl Sizes {
    fn meet(&mut self, blueprint: &Blueprint) {
        let smaller =
            |than: &Option<Blueprint>| than.as_ref().is_none_or(|than| blueprint.device_bytes() < than.device_bytes());
        if smaller(&self.smallest) {
            self.smallest = Some(blueprint.clone());
        }
        if blueprint.layout.grid.is_none() && smaller(&self.smallest_exact) {
            self.smallest_exact = Some(blueprint.clone());
        }
    }
}

impl<'a> Search<'a> {
    /// What is found with each of these, in their order, by several threads. Each search meets its own smallest ways, which are
    /// compared in that order too, so that nothing depends on who was first.
    fn each<T: Send, R: Send>(&self, items: Vec<T>, find: impl Fn(&Search, T) -> R + Sync) -> Vec<R> {
        let Search { request, limit, ref grid, ref weights_away, costs, sizes } = *self;
        let found = workers::map(items, |item| {
            let (met, grid, weights_away) = (RefCell::default(), grid.clone(), Arc::clone(weights_away));
            let found = find(&Search { request, limit, grid, weights_away, costs, sizes: &met }, item);
            (found, met.into_inner())
        });
        let meet = |(found, met): (R, Sizes)| {
            let met = met.smallest.iter().chain(&met.smallest_exact);
            met.for_each(|met| sizes.borrow_mut().meet(met));
            found
        };
        found.into_iter().map(meet).collect()
    }

    /// The same with weights in host memory, where they can be and that makes room.
    pub fn fetching(&self) -> Search<'a> {
        let away = self.request.fetchable(self.costs);
        match WeightBytes::new(&self.request.network, &away, self.costs).host >= self.limit / LEAST_ROOM {
            true => Search { weights_away: away.into(), ..self.clone() },
            false => self.clone(),
        }
    }

    /// What is found with weights in host memory, which takes the least of the device; or without, where host memory is short too.
    pub fn anywhere(&self, find: impl Fn(&Search<'a>) -> Option<Blueprint>) -> Option<Blueprint> {
        find(&self.fetching()).or_else(|| find(self))
    }

    /// The fastest way, wherever the weights are.
    pub fn quickest_of_all(&self, cuts: &[Arc<Cut>]) -> Option<Blueprint> {
        let fetching = self.fetching();
        if fetching.weights_away == self.weights_away {
            return self.quickest(cuts);
        }
        let found = fetching.quickest(cuts);
        // There is more room with weights elsewhere, and what does not wait for them loses nothing by it.
        if found.as_ref().is_some_and(|found| found.waits_for_weights() < WORTH_A_LOOK) {
            return found;
        }
        let both = [found, self.quickest(cuts)].into_iter().flatten();
        both.min_by(|a, b| a.seconds().total_cmp(&b.seconds()))
    }

    fn layouts(&self, cut: &Arc<Cut>) -> Vec<Layout> {
        let cut = match cut.weights_away[..] == *self.weights_away {
            true => Arc::clone(cut),
            false => Arc::new(Cut { weights_away: self.weights_away.to_vec(), ..(**cut).clone() }),
        };
        self.request.layouts(&cut, self.grid.clone())
    }

    /// The first of `cuts` that fits.
    pub fn first_packed(&self, cuts: &[Arc<Cut>]) -> Option<Blueprint> {
        let mut layouts = cuts.iter().flat_map(|cut| self.layouts(cut));
        layouts.find_map(|layout| {
            let found = self.least(layout)?;
            Some(found.packed(self.costs)).filter(|packed| self.fits(packed))
        })
    }

    /// The fastest of `cuts` and of many more that keep as much of the past on the device as fits.
    pub fn quickest(&self, cuts: &[Arc<Cut>]) -> Option<Blueprint> {
        let best = self.first_packed(cuts);
        if !self.request.can_band(self.costs) {
            return best;
        }
        let keeps: [Keep; 2] = [|search, cut| search.least_moved(cut), |search, cut| search.most_near(cut)];
        let tried = self.promising_cuts().into_iter().flat_map(|cut| keeps.map(|keep| (cut.clone(), keep)));
        let ways = self.each(tried.collect(), |search, (cut, keep)| {
            keep(search, &cut).map(|found| Candidate { found, cut, keep })
        });
        let mut ways: Vec<Candidate> = ways.into_iter().flatten().collect();
        let worth = |way: &Candidate| best.as_ref().is_none_or(|best| way.found.seconds() < best.seconds());
        // Frames of many sizes never fit exactly: where none of the fastest do, those may that leave some room.
        for share in SHARES {
            let roomy = |way: &Candidate| way.found.device_bytes() as f64 <= self.limit as f64 * share;
            for _ in 0..MOST_PACKED {
                let candidates = (0..ways.len()).filter(|i| worth(&ways[*i]) && roomy(&ways[*i]));
                let fastest = candidates.min_by_key(|i| rank(&ways[*i].found));
                let Some(fastest) = fastest else { break };
                let Candidate { found, cut, keep } = ways.swap_remove(fastest);
                let least = found.device_bytes();
                let packed = found.packed(self.costs);
                if self.fits(&packed) {
                    return Some(packed);
                }
                // The same with less of the past on the device may fit.
                let limit = (self.limit as f64 * least as f64 / packed.device_bytes() as f64 * 0.995) as u64;
                let found = keep(&Search { limit, ..self.clone() }, &cut);
                ways.extend(found.map(|found| Candidate { found, cut, keep }));
            }
        }
        best.or_else(|| self.smallest_banded())
    }

    /// One frame at a time with nothing of the past on the device, nor anything that can be made anew.
    fn smallest_banded(&self) -> Option<Blueprint> {
        let network = &*self.request.network;
        let one =
            Cut::new(network, self.request.slice.unwrap_or(1) * network.latent_rate(), vec![1; network.stages.len()]);
        let anew = self.request.makes_anew(self.costs).map(|stage| with_stored(&one, stage, 0));
        let cuts = [Some(one), anew].into_iter().flatten();
        let cuts = cuts.map(|cut| Arc::new(self.request.all_moved(&cut, self.costs)));
        self.first_packed(&cuts.collect::<Vec<_>>())
    }

    fn fits(&self, blueprint: &Blueprint) -> bool {
        blueprint.fits(self.limit, self.request.host_limit)
    }

    /// The first order of a cut that fits if its frames pack perfectly.
    fn first_that_fits(&self, cut: Arc<Cut>) -> Option<Blueprint> {
        self.layouts(&cut).into_iter().find_map(|layout| self.least(layout))
    }

    /// What a layout takes at the least, if that fits.
    fn least(&self, layout: Layout) -> Option<Blueprint> {
        let found = self.request.rehearse(layout, self.costs);
        if found.host_bytes() <= self.request.host_limit {
            self.sizes.borrow_mut().meet(&found);
        }
        Some(found).filter(|found| self.fits(found))
    }

    /// Of all wider cuts that fit at all, those that are fastest with nothing of the past on the device: a few for each number
    /// of frames at full resolution, as more of the past fits beside fewer frames; or beside fewer that are stored.
    fn promising_cuts(&self) -> Vec<Cut> {
        let anew = self.request.makes_anew(self.costs);
        let found = self.each(self.request.wider_cuts(), |search, cut| {
            let frames = match search.request.network.direction {
                Direction::Encode => cut.chunks[0],
                Direction::Decode => cut.chunks[cut.chunks.len() - 1],
            };
            (frames, search.most_stored(cut, anew))
        });
        let mut by_frames: BTreeMap<u64, Vec<(Rank, Cut)>> = BTreeMap::new();
        found.into_iter().for_each(|(frames, cut)| by_frames.entry(frames).or_default().extend(cut));
        let fastest = |mut cuts: Vec<(Rank, Cut)>| {
            cuts.sort_by_key(|(rank, _)| *rank);
            // Slower ones are worth a look if they take less than all that are faster.
            let mut least = u64::MAX;
            cuts.retain(|((_, bytes), _)| {
                let smaller = *bytes < least;
                least = least.min(*bytes);
                smaller
            });
            cuts.truncate(MOST_PROMISING);
            cuts.into_iter().flat_map(|(_, cut)| match anew {
                None => vec![cut],
                Some(stage) => {
                    let most = cut.stored[stage];
                    let mut fewer = vec![most, most * 2 / 3, most / 3];
                    fewer.dedup();
                    fewer.into_iter().map(|stored| with_stored(&cut, stage, stored)).collect()
                }
            })
        };
        by_frames.into_values().flat_map(fastest).collect()
    }

    /// A cut with as many frames of the stage `anew` stored as fit with nothing of the past on the device, and what it then takes.
    fn most_stored(&self, cut: Cut, anew: Option<usize>) -> Option<(Rank, Cut)> {
        let fits = |cut: &Cut| {
            let least = Arc::new(self.request.without_past(cut, self.costs, usize::MAX));
            self.first_that_fits(least).map(|found| (rank(&found), cut.clone()))
        };
        let found = fits(&cut);
        let (Some(stage), None) = (anew, &found) else { return found };
        let none = fits(&with_stored(&cut, stage, 0))?;
        let fewer = cut.stored[stage] as usize - 1;
        let (_, some) = most_that_fits(0, fewer, |stored| fits(&with_stored(&cut, stage, stored as u64)));
        some.or(Some(none))
    }

    /// A cut with all layers in bands, and with as much of the past on the device as fits: first of those that would have to
    /// wait for it the longest, and no more of it than keeps them from waiting.
    fn most_near(&self, cut: &Cut) -> Option<Blueprint> {
        let cut = self.request.without_past(cut, self.costs, usize::MAX);
        let beside = self.costs.rates().beside;
        let mut gains: Vec<(f64, LayerId, u8)> = Vec::new();
        for (layer, detour, bytes) in self.request.detours(&cut, self.costs) {
            match cut.past[layer] {
                Past::HOST => {
                    // What is near is copied there, which takes time that the rest can move in.
                    let waiting = detour.host / (detour.moving + detour.copying);
                    let share = (waiting * f64::from(Past::SHARES)).ceil() as u8;
                    let near = f64::from(share) / f64::from(Past::SHARES);
                    // More than that spares what runs beside the copies a little.
                    if share > 0 {
                        gains.push(((detour.host - detour.copying * near) / (bytes * near), layer, share));
                        gains.push(((beside * detour.moving - detour.copying) / bytes, layer, Past::SHARES));
                    }
                }
                Past::Again => gains.push((detour.again / bytes, layer, Past::SHARES)),
                Past::Bands { .. } | Past::Device => {}
            }
        }
        gains.retain(|(gain, ..)| *gain > 0.0);
        gains.sort_by(|a, b| b.0.total_cmp(&a.0));
        let with = |steps: usize, last: Option<(LayerId, u8)>| {
            let mut cut = cut.clone();
            let steps = gains[..steps].iter().map(|(_, layer, near)| (*layer, *near));
            steps.chain(last).for_each(|(layer, near)| cut.past[layer] = Past::Bands { near });
            self.first_that_fits(Arc::new(cut))
        };
        let (steps, found) = most_that_fits(0, gains.len(), |steps| with(steps, None));
        // And of the next one, what there is room for.
        let Some(&(_, layer, share)) = gains.get(steps).filter(|(_, layer, _)| cut.past[*layer] == Past::HOST) else {
            return found;
        };
        let reached = gains[..steps].iter().filter(|(_, other, _)| *other == layer).map(|(.., near)| *near).max();
        let (least, most) = (usize::from(reached.unwrap_or(0)), usize::from(share) - 1);
        let (_, more) = most_that_fits(least, most, |near| with(steps, Some((layer, near as u8))));
        more.or(found)
    }

    /// A still image in bands, with as few frames in host memory as fits, the largest first.
    pub fn least_away(&self) -> Option<Blueprint> {
        if !self.request.is_still() || !self.request.can_band(self.costs) {
            return None;
        }
        let network = &*self.request.network;
        let shapes = network.input_shapes(self.request.input_frame());
        let frames = BandFrames { inputs: 1, outputs: 1, outs: 1, ..BandFrames::default() };
        let mut order: Vec<(u64, LayerId)> = leavable(network)
            .into_iter()
            .filter(|layer| self.costs.band_bytes(&network.layers[*layer].layout, shapes[*layer], frames).is_some())
            .map(|layer| {
                let layout = &network.layers[layer].layout;
                (self.costs.frame_bytes(layout.window.output(shapes[layer], layout.cout)), layer)
            })
            .collect();
        order.sort_by(|a, b| b.cmp(a));
        let one = Cut::new(network, network.latent_rate(), vec![1; network.stages.len()]);
        let mut cut = self.request.all_moved(&one, self.costs);
        order.into_iter().find_map(|(_, layer)| {
            cut.away[layer] = true;
            self.first_packed(&[Arc::new(cut.clone())])
        })
    }

    /// A cut with as few layers' past off the device as fits.
    fn least_moved(&self, cut: &Cut) -> Option<Blueprint> {
        let with = |layers: usize| {
            let cut = Arc::new(self.request.without_past(cut, self.costs, layers));
            self.first_that_fits(cut)
        };
        let (mut too_few, mut enough) = (0, movable(&self.request.network, self.costs).len());
        let mut found = with(enough)?;
        while too_few + 1 < enough {
            let middle = (too_few + enough) / 2;
            match with(middle) {
                Some(fits) => (found, enough) = (fits, middle),
                None => too_few = middle,
            }
        }
        Some(found)
    }
}

/// Of what is known to fit with `fits` and is tried with up to `most`: how many fit, and what was found with these.
fn most_that_fits<T>(fits: usize, most: usize, with: impl Fn(usize) -> Option<T>) -> (usize, Option<T>) {
    let (mut fits, mut too_many, mut found) = (fits, most + 1, None);
    while fits + 1 < too_many {
        let middle = (fits + too_many) / 2;
        match with(middle) {
            Some(more) => (found, fits) = (Some(more), middle),
            None => too_many = middle,
        }
    }
    (fits, found)
}

fn with_stored(cut: &Cut, stage: usize, stored: u64) -> Cut {
    let mut cut = cut.clone();
    cut.stored[stage] = stored;
    cut
}
