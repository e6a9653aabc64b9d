//! Candidate policies: how many frames at a time, and where caches go.

use std::iter::once;
use std::sync::Arc;

use crate::ir::{BandPart, BandShape, CacheFormat, DeviceProfile, LayerId, SplitColumns};
use crate::model::{ChunkPairs, Network, Reader};
use crate::plan::cost::{CostModel, OffloadCost, Target};
use crate::plan::exclusions::Choices;
use crate::plan::policy::{LayerPolicy, MIN_MATERIALISED_HIDDEN, Placement, SchedulePolicy};
use crate::plan::request::Request;

/// Latent frames per slice, at most. On the corpus (2026-11-16) slices of three and four gained 1.09; longer ones queue
/// more frames at every stage.
pub const MAX_PLANNED_SLICE: u64 = 4;
/// Latents are a small part of the work, so this fraction of a busy device's pixels suffices. Set by hand.
const SLICE_SHARE: u64 = 8;
/// Frames of a chunk that is also tried as it is, though it cuts pairs. One frame of three is alone and takes longer.
/// But a cache moves less often than with two (measured 2026-11-18, docs/history).
const CUT_PAIRS: u64 = 3;

/// Policies with everything resident, from the fastest to the smallest.
pub fn resident_policies(request: &Request, profile: &DeviceProfile) -> Vec<Arc<SchedulePolicy>> {
    let network = &request.network;
    let wish = network.stage_pixels(request.input_frame()).into_iter();
    let wish: Vec<u64> = wish
        .enumerate()
        .map(|(stage, pixels)| {
            let least = if network.chunk_pairs(stage) == ChunkPairs::None { 1 } else { 2 };
            profile.busy_pixels.div_ceil(pixels.max(1)).clamp(least, profile.chunk_frames)
        })
        .collect();
    let (rows, columns) = request.latent();
    let slice = (profile.busy_pixels / SLICE_SHARE / (rows * columns).max(1)).clamp(1, MAX_PLANNED_SLICE);
    let mut policies: Vec<Arc<SchedulePolicy>> = Vec::new();
    for cap in [profile.chunk_frames, 4, 2, 1] {
        let slice = request.slice_latents().unwrap_or(slice.min(cap)) * network.latent_rate();
        let most = request.chunk.unwrap_or(cap).min(cap);
        let chunks = whole_pairs(network, wish.iter().map(|wish| (*wish).min(most)));
        let mut policy = SchedulePolicy::resident(network, slice, chunks);
        if !request.is_still() {
            let layers = network.layers.iter().zip(&mut policy.layers);
            let rounded = layers.filter(|(layer, _)| layer.cache == CacheFormat::U8);
            rounded.for_each(|(_, own)| *own = own.banded(Placement::RESIDENT));
        }
        let policy = Arc::new(policy);
        if !policies.contains(&policy) {
            policies.push(policy);
        }
    }
    policies
}

/// Chunks of whole pairs in stages that keep them.
fn whole_pairs(network: &Network, chunks: impl Iterator<Item = u64>) -> Vec<u64> {
    let whole = |(stage, chunk): (usize, u64)| {
        if network.chunk_pairs(stage).are_kept(chunk) { (chunk / 2 * 2).max(2) } else { chunk }
    };
    chunks.enumerate().map(whole).collect()
}

/// Policies for banded layers. Bands cost little memory and gain by many frames: their cache is moved once for all of
/// them.
pub fn banded_policies(request: &Request, profile: &DeviceProfile) -> Vec<SchedulePolicy> {
    let network = &*request.network;
    if request.is_still() {
        return vec![SchedulePolicy::resident(network, network.latent_rate(), vec![1; network.stages.len()])];
    }
    let pixels = network.stage_pixels(request.input_frame());
    let largest = pixels.iter().copied().max().unwrap_or(1);
    let rates = network.later_stage_frames(network.geometry.time);
    let allowed = request.chunk.unwrap_or(profile.chunk_frames).min(profile.chunk_frames);
    let may_cut_pairs = (0..network.stages.len()).all(|stage| network.chunk_pairs(stage) != ChunkPairs::Required);
    let mut policies: Vec<SchedulePolicy> = Vec::new();
    for slice in 1..=MAX_PLANNED_SLICE {
        let slice = request.slice_latents().unwrap_or(slice) * network.latent_rate();
        for (most, at_half) in [8, 6, 4, 3, 2, 1].into_iter().flat_map(|most| [most, 2 * most].map(|half| (most, half)))
        {
            // Frames at full resolution, as many or twice as many at half of it, and twice as many with each further
            // halving, which has a quarter of the pixels.
            let chunk = |pixels: &u64| match (largest / pixels.max(&1)).ilog2() / 2 {
                0 => most,
                halvings => at_half << (halvings - 1),
            };
            // No more than a slice brings.
            let chunks = pixels.iter().zip(network.later_stage_frames(slice));
            let chunks = chunks.map(|(pixels, frames)| chunk(pixels).clamp(1, allowed.min(frames)));
            let chunks: Vec<u64> = chunks.collect();
            // Or no more at a quarter of the resolution than the chunks at half of it feed, so that none are queued.
            let mut matched = chunks.clone();
            if let [Some(half), Some(quarter)] = [4, 16].map(|share| pixels.iter().position(|p| p * share == largest)) {
                matched[quarter] = chunks[quarter].min((chunks[half] * rates[quarter]).div_ceil(rates[half]));
            }
            let whole = [&chunks, &matched].map(|chunks| whole_pairs(network, chunks.iter().copied()));
            let cut = [chunks, matched].into_iter().filter(|_| most == CUT_PAIRS && may_cut_pairs);
            for chunks in whole.into_iter().chain(cut) {
                let policy = SchedulePolicy::resident(network, slice, chunks);
                if !policies.contains(&policy) {
                    policies.push(policy);
                }
            }
        }
    }
    policies
}

/// A policy as it is, and with as few hidden frames of `stage` materialised as can be.
pub fn fewer_hidden(policy: SchedulePolicy, network: &Network, stage: Option<usize>) -> Vec<SchedulePolicy> {
    let fewer = stage.map(|stage| policy.with_materialised_hidden(network, stage, MIN_MATERIALISED_HIDDEN));
    let mut both: Vec<_> = once(policy).chain(fewer).collect();
    both.dedup();
    both
}

/// Of each layer that can run in bands, the cost of not keeping its cache resident.
pub fn offload_costs(request: &Request, policy: &SchedulePolicy, target: &Target) -> Vec<OffloadCost> {
    let (network, shapes) = (&*request.network, request.network.input_shapes(request.input_frame()));
    let costs = CostModel { network, target: *target };
    let bandable = target.bandable_layers(network).into_iter();
    bandable.map(|layer| costs.offload_cost(policy, layer, &shapes)).collect()
}

/// The policy with no cache resident. A cache is recomputed if that is faster than moving it.
pub fn without_caches(request: &Request, policy: &SchedulePolicy, target: &Target) -> SchedulePolicy {
    let network = &*request.network;
    let mut policy = policy.clone();
    for OffloadCost { layer, offloaded, recomputed, .. } in offload_costs(request, &policy, target) {
        let own = policy.layers[layer].banded(Placement::Recomputed);
        let reads_rematerialised = policy.rematerialised_for(network, layer).is_some();
        let may_recompute = Choices { reads_rematerialised, ..Choices::of(own) }.exclusion().is_none();
        let recompute = may_recompute && network.recomputed_by(layer).is_some() && recomputed < offloaded;
        policy.layers[layer] = if recompute { own } else { own.banded(Placement::HOST) };
    }
    policy
}

/// The policy with every cache in host memory, which takes the least.
pub fn all_offloaded(request: &Request, policy: &SchedulePolicy, target: &Target) -> SchedulePolicy {
    let mut policy = policy.clone();
    for layer in target.bandable_layers(&request.network) {
        policy.layers[layer] = policy.layers[layer].banded(Placement::HOST);
    }
    policy
}

/// The stage with the most pixels, if the outputs of its first layer can be rematerialised.
pub fn rematerialising_stage(request: &Request, target: &Target) -> Option<usize> {
    let (network, stage) = (&request.network, request.network.largest_stage());
    let can = target.profile.offloads && can_stream_outputs(request, network.stages[stage].head(), target);
    can.then_some(stage)
}

/// The stage with the most pixels, if hidden frames of its layers can be rematerialised.
pub fn hidden_stage(request: &Request, target: &Target) -> Option<usize> {
    let (network, stage) = (&request.network, request.network.largest_stage());
    let mut firsts = network.stages[stage].body().filter_map(|layer| network.hidden_by(layer)).peekable();
    let hidden = LayerPolicy { rematerialised: 1, ..LayerPolicy::RESIDENT.banded(Placement::RESIDENT) };
    let rounds = network.chunk_pairs(stage) == ChunkPairs::Required;
    let is_allowed = Choices { rounds, ..Choices::of(hidden) }.exclusion().is_none();
    let can = target.profile.offloads && is_allowed && firsts.peek().is_some();
    (can && firsts.all(|first| can_stream_outputs(request, first, target))).then_some(stage)
}

/// Whether a layer can run in bands whose outputs are not resident, and all readers with it.
pub fn can_stream_outputs(request: &Request, layer: LayerId, target: &Target) -> bool {
    let network = &request.network;
    let in_bands = |reader: &Reader| target.can_run_banded(network, reader.layer);
    if !network.may_stream(layer) || !network.readers(layer).iter().all(in_bands) {
        return false;
    }
    let input = network.input_shapes(request.input_frame())[layer];
    let (layout, columns) = (network.layers[layer].layout, SplitColumns::all_resident(input.width));
    let shape = BandShape { layout, input, columns, format: CacheFormat::Exact };
    target.sizes.band_bytes(&shape, &[BandPart::Input(0), BandPart::Output(0)], 1).is_some()
}
