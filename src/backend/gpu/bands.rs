//! Convolutions in bands of rows, for layers with offloaded inputs, causal caches or outputs. While one band computes,
//! the copy engines fetch for the next one and offload the last one's results. Bands alternate between two compute
//! queues, so that multiprocessors that idle at the end of one begin the next.

use std::collections::HashMap;
use std::ops::Range;

use super::api::{
    ConvBand, ConvLaunch, GpuApi, GpuConv, NextNorm, NormInPlace, NormOf, NormRows, Queue, RowCopy, RowPitches,
    SplitFrames, U8Copy, U8Rows,
};
use super::copies::{HostFrames, HostRows};
use super::division::{self, BandRows, BandSteps, Division, InFlightBand, RowsAt, host_frame};
use super::rows::{self, BANDS_IN_FLIGHT, RowSizes};
use crate::backend::RunArgs;
use crate::error::{Error, Result};
use crate::ir::{
    BandPart, BandSource, BandedConvOp, CacheFormat, ConvFrame, DeviceOffset, FrameRef, FrameShape, Offsets,
    PartialSums, RematerialisedFrame, Term,
};

/// How far the band in a buffer is.
struct BandBuffer<E> {
    /// Input from host memory has arrived.
    fetched: E,
    /// All other input is prepared.
    ready: E,
    computed: E,
    /// The host part of the new cache is in 8 bits.
    written: E,
    /// The resident part of the new cache has been copied out.
    cached: E,
    /// Everything for host memory has been copied out.
    offloaded: E,
}

impl<E> BandBuffer<E> {
    fn new(event: impl Fn() -> Result<E>) -> Result<BandBuffer<E>> {
        let (fetched, ready, written) = (event()?, event()?, event()?);
        Ok(BandBuffer { fetched, ready, written, computed: event()?, cached: event()?, offloaded: event()? })
    }
}

/// The offloaded frames of a job, and the bands in flight.
pub struct BandPipeline<G: GpuApi> {
    pub host: HostFrames<G>,
    /// Bands alternate between these.
    compute: [G::Queue; 2],
    buffers: Vec<BandBuffer<G::Event>>,
    next_buffer: usize,
    /// When each offloaded frame has arrived in host memory, by its offset.
    arrived: HashMap<u64, G::Event>,
}

impl<G: GpuApi> BandPipeline<G> {
    /// `bytes`: of offloaded frames.
    pub fn new(gpu: &G, bytes: u64) -> Result<BandPipeline<G>> {
        Ok(BandPipeline {
            host: HostFrames::new(gpu, bytes)?,
            compute: [gpu.queue()?, gpu.queue()?],
            buffers: (0..BANDS_IN_FLIGHT).map(|_| BandBuffer::new(|| gpu.event())).collect::<Result<_>>()?,
            next_buffer: 0,
            arrived: HashMap::new(),
        })
    }

    /// Later work in the main queue waits for all bands in flight, and later bands wait for the main queue.
    pub fn join(&self, gpu: &G) -> Result<()> {
        join(gpu, &self.host.upload, &self.queues())
    }

    pub fn synchronise(&self) -> Result<()> {
        self.queues().into_iter().map(Queue::synchronise).fold(Ok(()), Result::and)
    }

    fn queues(&self) -> [&G::Queue; 4] {
        let [even, odd] = &self.compute;
        [&self.host.upload, &self.host.download, even, odd]
    }

    /// `weights`: of the operation's layer, fetched if they are offloaded.
    pub fn run(
        &mut self,
        gpu: &G,
        block: &G::Block,
        op: &BandedConvOp<Offsets>,
        weights: G::Weights,
        args: &RunArgs<G::Conv>,
    ) -> Result<()> {
        let division = Division::new(gpu.sizes(), op, args.buffers.bands)?;
        let mut conv = BandedConv { gpu, pipeline: self, block, weights, division, args, launched: None };
        conv.await_offloaded_inputs()?;
        conv.save_statistics()?;
        let rows = conv.division.rows;
        division::run_pipeline(op.input.height, rows, &mut conv)?;
        conv.finish()
    }
}

/// Later work in the main queue waits for all of `queues`, and later work in `then` for the main queue.
pub fn join<G: GpuApi>(gpu: &G, then: &G::Queue, queues: &[&G::Queue]) -> Result<()> {
    let (event, main) = (gpu.event()?, gpu.main_queue());
    for queue in queues {
        queue.record(&event)?;
        main.wait_for(&event)?;
    }
    main.record(&event)?;
    then.wait_for(&event)
}

/// A banded convolution in progress.
struct BandedConv<'a, G: GpuApi> {
    gpu: &'a G,
    pipeline: &'a mut BandPipeline<G>,
    block: &'a G::Block,
    weights: G::Weights,
    division: Division<'a, G::Sizes>,
    args: &'a RunArgs<'a, G::Conv>,
    /// Of the last band's launch. What statistics need is the same in all of them.
    launched: Option<G::Launched>,
}

impl<G: GpuApi> BandSteps for BandedConv<'_, G> {
    fn fetch(&mut self, rows: BandRows, above: Option<&InFlightBand>) -> Result<InFlightBand> {
        let buffer = self.pipeline.next_buffer;
        self.pipeline.next_buffer = (buffer + 1) % self.pipeline.buffers.len();
        let band = InFlightBand { buffer, rows };
        self.await_buffer(&band)?;
        self.fetch_from_host(&band, above)?;
        if self.division.op.has_norm() {
            self.normalise_resident(&band, above)?;
            self.rematerialise_inputs(&band, above)?;
            if let Some(above) = above {
                self.share_halo(above, &band)?;
            }
        }
        self.gpu.main_queue().record(&self.buffer(&band).ready)?;
        Ok(band)
    }

    fn compute(&mut self, band: &InFlightBand) -> Result<()> {
        let (buffer, op, rows) = (self.buffer(band), self.division.op, &band.rows);
        self.complete_input(band)?;
        let frames = self.division.conv_frames(band);
        // Without a norm the input is read where it lies.
        let input_rows = if op.has_norm() { rows.input.clone() } else { 0..op.input.height };
        let queue = self.compute_queue(band);
        queue.wait_for(&buffer.fetched)?;
        queue.wait_for(&buffer.ready)?;
        if op.format == CacheFormat::U8 {
            self.round(band, queue)?;
        }
        let split = self.division.split_frames(band);
        let split = (!split.is_empty()).then_some(SplitFrames { columns: op.columns, frames: &split });
        let launch = ConvBand { rows: rows.own.clone(), input_rows, split, queue: Some(queue), next_norm: None };
        let conv = conv_launch(op, &PartialSums::NONE, self.args.buffers.scratch);
        let launched = self.gpu.conv_band(self.block, &self.weights, &conv, &frames, &launch)?;
        queue.record(&buffer.computed)?;
        self.offload(band)?;
        self.launched = Some(launched);
        Ok(())
    }

    /// The bands above and below compute in the same queue, which the copy enters after both.
    fn cache(&mut self, band: &InFlightBand, below: Option<&InFlightBand>) -> Result<()> {
        let (division, own) = (&self.division, &band.rows.own);
        let frames = division.op.cache_writes().filter_map(|(i, to)| {
            let to = division.resident_rows(to.resident?).row(own.start);
            Some((division.input_rows(band, i).row(own.start), to))
        });
        let frames: Vec<(u64, u64)> = frames.collect();
        if frames.is_empty() {
            return Ok(());
        }
        let (buffer, queue) = (self.buffer(band), self.compute_queue(below.unwrap_or(band)));
        queue.wait_for(&buffer.computed)?;
        match division.op.format {
            CacheFormat::Exact => {
                let ([to, _], from) = (division.cached_rows(), self.sizes().row_bytes(division.op.input));
                let bytes = (own.end - own.start) * to;
                let copies: Vec<RowCopy> =
                    frames.iter().map(|(from, to)| RowCopy { from: *from, to: *to, bytes }).collect();
                self.gpu.copy_rows(Some(queue), self.block, &copies, Some(RowPitches { row: to, from, to }))?;
            }
            CacheFormat::U8 => {
                let resident = self.u8_rows(division.resident_shape(), own);
                self.gpu.copy_u8(queue, self.block, U8Copy::Store, resident, &frames)?;
            }
        }
        queue.record(&buffer.cached)
    }
}

impl<G: GpuApi> BandedConv<'_, G> {
    fn sizes(&self) -> G::Sizes {
        self.gpu.sizes()
    }

    fn buffer(&self, band: &InFlightBand) -> &BandBuffer<G::Event> {
        &self.pipeline.buffers[band.buffer]
    }

    fn compute_queue(&self, band: &InFlightBand) -> &G::Queue {
        &self.pipeline.compute[(band.rows.own.start / self.division.rows % 2) as usize]
    }

    /// Columns of these rows, as many as `part` has.
    fn u8_rows(&self, part: FrameShape, rows: &Range<u64>) -> U8Rows {
        U8Rows { part, width: self.division.op.input.width, rows: rows.end - rows.start }
    }

    /// Restores cached frames from 8 bits, rounds fresh ones that are read so, and brings what goes to host memory to
    /// 8 bits.
    fn round(&self, band: &InFlightBand, queue: &G::Queue) -> Result<()> {
        let copy = |copy: U8Copy, part: FrameShape, rows: &Range<u64>, frames: Vec<(u64, u64)>| {
            self.gpu.copy_u8(queue, self.block, copy, self.u8_rows(part, rows), &frames)
        };
        let (division, op, rows) = (&self.division, self.division.op, &band.rows);
        let (first, own) = (rows.input.start, rows.own.start);
        let [resident, host] = [division.resident_shape(), division.host_shape()];
        // The host part has the right columns.
        let right = self.sizes().row_bytes(op.input) - self.sizes().row_bytes(host);
        let input = |i: usize, row: u64| division.input_rows(band, i).row(row);
        let from_device =
            op.cached().filter_map(|(i, at)| Some((division.resident_rows(at.resident?).row(first), input(i, first))));
        copy(U8Copy::Restore, resident, &rows.input, from_device.collect())?;
        let from_host = op.cached().filter_map(|(i, _)| {
            let from = division.rows_of(band, BandPart::HostColumns(i))?.row(first);
            Some((from, input(i, first) + right))
        });
        copy(U8Copy::Restore, host, &rows.input, from_host.collect())?;
        let rounded = (0..op.inputs.len())
            .filter_map(|i| Some((input(i, first), division.rows_of(band, BandPart::Rounded(i))?.row(first))));
        copy(U8Copy::Round, op.input, &rows.input, rounded.collect())?;
        let written = (0..op.inputs.len()).filter_map(|i| {
            let to = division.rows_of(band, BandPart::NewHostColumns(i))?.row(own);
            Some((input(i, own) + right, to))
        });
        copy(U8Copy::Store, host, &rows.own, written.collect())?;
        queue.record(&self.buffer(band).written)
    }

    fn await_offloaded_inputs(&self) -> Result<()> {
        for frame in self.division.fetched_frames() {
            if let Some(arrived) = self.pipeline.arrived.get(&frame.0) {
                self.pipeline.host.upload.wait_for(arrived)?;
            }
        }
        Ok(())
    }

    /// Copies the statistics of frames that will be rematerialised, before an output overwrites them.
    fn save_statistics(&self) -> Result<()> {
        let (op, sizes) = (self.division.op, self.sizes());
        if op.layout.norm.groups() == 0 {
            return Ok(());
        }
        let saved = op.inputs.iter().filter_map(|input| Some((input.from, input.statistics_to?)));
        let copies = saved.map(|(from, to)| match from {
            BandSource::Fresh(FrameRef::Resident(frame)) => {
                let from = frame.0 + sizes.data_bytes(op.input);
                Ok(RowCopy { from, to: to.0, bytes: sizes.statistics_bytes(op.layout.norm.groups()) })
            }
            _ => Err(Error::Internal("statistics are to be saved that are saved already".into())),
        });
        self.gpu.copy_rows(None, self.block, &copies.collect::<Result<Vec<_>>>()?, None)
    }

    /// Joins the main queue, marks offloaded frames, and launches the statistics.
    fn finish(self) -> Result<()> {
        let BandedConv { gpu, pipeline, block, division, launched, args, .. } = self;
        let op = division.op;
        for buffer in &pipeline.buffers {
            gpu.main_queue().wait_for(&buffer.computed)?;
            gpu.main_queue().wait_for(&buffer.cached)?;
        }
        for frame in division.offloaded_frames() {
            let arrived = match pipeline.arrived.remove(&frame.0) {
                Some(event) => event,
                None => gpu.event()?,
            };
            pipeline.host.download.record(&arrived)?;
            pipeline.arrived.insert(frame.0, arrived);
        }
        let Some(launched) = launched else { return Ok(()) };
        let statistics = op.frames.iter().map(|frame| match frame.out {
            FrameRef::Resident(out) => DeviceOffset(out.0 + gpu.sizes().data_bytes(division.output)),
            FrameRef::Offloaded { statistics, .. } | FrameRef::Rematerialised { statistics, .. } => statistics,
        });
        let conv = conv_launch(op, &PartialSums::NONE, args.buffers.scratch);
        gpu.statistics(block, &conv, &launched, &statistics.collect::<Vec<_>>())
    }

    /// Orders a band after the one that had its buffer before.
    fn await_buffer(&self, band: &InFlightBand) -> Result<()> {
        let (buffers, upload) = (&self.pipeline.buffers, &self.pipeline.host.upload);
        let BandBuffer { computed, cached, offloaded, .. } = self.buffer(band);
        let all = [computed, cached, offloaded];
        all.into_iter().try_for_each(|event| self.gpu.main_queue().wait_for(event))?;
        // Another layer's band may have divided the buffer differently. After one of this layer, the parts that are
        // still copied out are not those that are fetched.
        let same_layer = band.rows.own.start / self.division.rows >= buffers.len() as u64;
        let awaited = if same_layer && self.division.fetches_nothing_fresh() { &all[..1] } else { &all[..] };
        awaited.iter().try_for_each(|event| upload.wait_for(event))?;
        // The band below the one before has copied its halo from here.
        upload.wait_for(&buffers[(band.buffer + 1) % buffers.len()].ready)
    }

    /// Cached frames, fresh frames and shortcuts that are offloaded.
    fn fetch_from_host(&self, band: &InFlightBand, above: Option<&InFlightBand>) -> Result<()> {
        let (division, op, rows) = (&self.division, self.division.op, &band.rows);
        let (host, new) = (&self.pipeline.host, rows.shared(above).end..rows.input.end);
        let [_, row_bytes] = division.cached_rows();
        let cached = op.cached().filter_map(|(i, cached)| {
            let from = HostRows { frame: cached.host?, row_bytes, rows: &new };
            Some((from, division.rows_of(band, BandPart::HostColumns(i))?.row(new.start)))
        });
        host.fetch_cached(self.gpu, self.block, &cached.collect::<Vec<_>>())?;
        for (i, at) in op.fresh() {
            if let Some(frame) = host_frame(at) {
                let to = division.input_rows(band, i);
                let from = HostRows { frame, row_bytes: to.row_bytes, rows: &rows.input };
                host.fetch_rows(self.gpu, self.block, &from, to.offset)?;
            }
        }
        for (i, frame) in op.frames.iter().enumerate() {
            let offloaded = frame.shortcut.and_then(|shortcut| host_frame(shortcut.from));
            if let (Some(frame), Some(to)) = (offloaded, division.rows_of(band, BandPart::Shortcut(i))) {
                let from = HostRows { frame, row_bytes: to.row_bytes, rows: &rows.own };
                host.fetch_rows(self.gpu, self.block, &from, to.offset)?;
            }
        }
        host.upload.record(&self.buffer(band).fetched)
    }

    /// Fresh frames on the device, but for the rows that the band above has normalised.
    fn normalise_resident(&self, band: &InFlightBand, above: Option<&InFlightBand>) -> Result<()> {
        let (division, op) = (&self.division, self.division.op);
        let new = band.rows.shared(above).end..band.rows.input.end;
        let resident = op.fresh().filter_map(|(i, at)| match at {
            FrameRef::Resident(frame) => Some((frame, DeviceOffset(division.input_rows(band, i).row(new.start)))),
            FrameRef::Offloaded { .. } | FrameRef::Rematerialised { .. } => None,
        });
        let resident: Vec<(DeviceOffset, DeviceOffset)> = resident.collect();
        if resident.is_empty() || new.is_empty() {
            return Ok(());
        }
        let rows = NormRows { rows: new, out_bytes: division.input_bytes() };
        self.gpu.norm(self.block, &self.own_norm(), &resident, Some(rows))
    }

    /// Rematerialises fresh frames, but for the rows that the band above has made.
    fn rematerialise_inputs(&self, band: &InFlightBand, above: Option<&InFlightBand>) -> Result<()> {
        let InFlightBand { buffer, rows } = band;
        let (division, op) = (&self.division, self.division.op);
        let (mut copies, mut outs, mut known) = (Vec::new(), Vec::new(), Vec::new());
        for (i, at) in op.fresh() {
            let FrameRef::Rematerialised { index, statistics } = at else { continue };
            let to = division.input_rows(band, i);
            if let Some(above) = above {
                let from = division.input_rows(above, i).row(rows.input.start);
                let bytes = rows.rematerialised.start.saturating_sub(rows.input.start) * to.row_bytes;
                copies.push(RowCopy { from, to: to.offset, bytes });
            }
            outs.push((index, to.virtual_top()));
            known.push(statistics);
        }
        self.gpu.copy_rows(None, self.block, &copies, None)?;
        if outs.is_empty() || rows.rematerialised.is_empty() {
            return Ok(());
        }
        // A convolution from pixels is so short that a separate norm would double its time.
        if let Some(by) = &op.rematerialise
            && self.gpu.normalises_output(&by.layout)?
        {
            let norm = NextNorm { of: self.own_norm(), statistics: &known };
            return self.rematerialise(*buffer, &outs, &rows.rematerialised, Some(norm));
        }
        // The part of a block's input holds a band and its halo. So the lead of the first band is a launch of its own.
        let is_block = op.rematerialise.as_ref().is_some_and(|by| !by.block_inputs.is_empty());
        let step = if is_block { division.rows } else { op.input.height };
        for top in rows.rematerialised.clone().step_by(step as usize) {
            self.rematerialise(*buffer, &outs, &(top..(top + step).min(rows.rematerialised.end)), None)?;
        }
        for (i, at) in op.fresh() {
            let FrameRef::Rematerialised { statistics, .. } = at else { continue };
            let first = DeviceOffset(division.input_rows(band, i).row(rows.rematerialised.start));
            let pixels = (rows.rematerialised.end - rows.rematerialised.start) * op.input.width;
            self.gpu.norm_in_place(self.block, &self.own_norm(), NormInPlace { first, pixels, statistics })?;
        }
        Ok(())
    }

    /// The norm of the operation's layer.
    fn own_norm(&self) -> NormOf<'_, G> {
        let op = self.division.op;
        NormOf { weights: &self.weights, layout: &op.layout, shape: op.input }
    }

    /// Computes these rows of frames, (index, virtual begin) each. Normalises what they read of a block's input.
    fn rematerialise(
        &self,
        buffer: usize,
        outs: &[(usize, DeviceOffset)],
        rows: &Range<u64>,
        next_norm: Option<NextNorm<G>>,
    ) -> Result<()> {
        let Some(by) = &self.division.op.rematerialise else {
            return Err(Error::Internal("a frame is to be rematerialised, but no layer makes it".into()));
        };
        let (layout, input) = (&by.layout, by.input);
        let weights = self.args.weights[by.layer].resident()?;
        let normalised = self.division.normalised_block_inputs(buffer);
        let mut input_rows = 0..input.height;
        if !normalised.is_empty() {
            input_rows = rows::with_halo(rows, input.height);
            let rows = NormRows { rows: input_rows.clone(), out_bytes: self.division.input_bytes() };
            let norm = NormOf { weights: &weights, layout, shape: input };
            self.gpu.norm(self.block, &norm, &normalised, Some(rows))?;
        }
        let made = outs.iter().map(|(index, out)| {
            let RematerialisedFrame { terms, bias } = &by.frames[*index];
            let terms = terms.iter().map(|term| Ok(Term { frame: read_at(term.frame, &normalised)?, ..*term }));
            Ok(ConvFrame { terms: terms.collect::<Result<_>>()?, bias: *bias, residual: None, out: *out })
        });
        let made = made.collect::<Result<Vec<ConvFrame<Offsets>>>>()?;
        let per_row = rows::output_rows(layout);
        let (scratch, partial_sums) = (self.args.buffers.scratch, &PartialSums::NONE);
        let conv = ConvLaunch { layout, input, statistics: false, scratch, partial_sums };
        let rows = rows.start / per_row..rows.end / per_row;
        let band = ConvBand { rows, input_rows, next_norm, ..ConvBand::whole(layout, input) };
        self.gpu.conv_band(self.block, &weights, &conv, &made, &band).map(|_| ())
    }

    /// Copies the rows that a band shares with the one above: host parts of cached frames, and normalised fresh frames.
    fn share_halo(&self, above: &InFlightBand, band: &InFlightBand) -> Result<()> {
        let (division, op, shared) = (&self.division, self.division.op, band.rows.shared(Some(above)));
        let count = shared.end - shared.start;
        let copy = |from: RowsAt, to: RowsAt| RowCopy {
            from: from.row(shared.start),
            to: to.row(shared.start),
            bytes: count * to.row_bytes,
        };
        let cached = op.cached().filter_map(|(i, _)| {
            let [from, to] = [above, band].map(|band| division.rows_of(band, BandPart::HostColumns(i)));
            Some(copy(from?, to?))
        });
        let mut copies: Vec<RowCopy> = cached.collect();
        if !copies.is_empty() {
            self.gpu.main_queue().wait_for(&self.buffer(above).fetched)?;
        }
        let normalised = op.fresh().filter(|(_, fresh)| matches!(fresh, FrameRef::Resident(_)));
        copies.extend(normalised.map(|(i, _)| copy(division.input_rows(above, i), division.input_rows(band, i))));
        self.gpu.copy_rows(None, self.block, &copies, None)
    }

    /// What has to wait for the fetch: norms of fresh frames from host memory, and rematerialised shortcuts.
    fn complete_input(&self, band: &InFlightBand) -> Result<()> {
        let InFlightBand { buffer, rows } = band;
        let (division, op) = (&self.division, self.division.op);
        let from_host = op.fresh().filter_map(|(i, at)| match at {
            FrameRef::Offloaded { statistics, .. } => {
                Some((DeviceOffset(division.input_rows(band, i).offset), statistics))
            }
            FrameRef::Resident(_) | FrameRef::Rematerialised { .. } => None,
        });
        let from_host: Vec<(DeviceOffset, DeviceOffset)> = from_host.collect();
        let shortcuts = op.frames.iter().enumerate().filter_map(|(i, frame)| match frame.shortcut?.from {
            FrameRef::Rematerialised { index, .. } => {
                Some((index, division.rows_of(band, BandPart::Shortcut(i))?.virtual_top()))
            }
            FrameRef::Resident(_) | FrameRef::Offloaded { .. } => None,
        });
        let shortcuts: Vec<(usize, DeviceOffset)> = shortcuts.collect();
        if from_host.is_empty() && shortcuts.is_empty() {
            return Ok(());
        }
        let queue = self.gpu.main_queue();
        if !from_host.is_empty() {
            queue.wait_for(&self.buffer(band).fetched)?;
        }
        for (first, statistics) in from_host {
            let pixels = (rows.input.end - rows.input.start) * op.input.width;
            self.gpu.norm_in_place(self.block, &self.own_norm(), NormInPlace { first, pixels, statistics })?;
        }
        if !shortcuts.is_empty() {
            self.rematerialise(*buffer, &shortcuts, &rows.own, None)?;
        }
        queue.record(&self.buffer(band).ready)
    }

    /// The host part of the new cache, and outputs that are offloaded.
    fn offload(&self, band: &InFlightBand) -> Result<()> {
        let (division, op, own) = (&self.division, self.division.op, &band.rows.own);
        let (host, buffer) = (&self.pipeline.host, self.buffer(band));
        // The new cache may overwrite rows of the old one that the band has fetched.
        host.download.wait_for(&buffer.fetched)?;
        host.download.wait_for(if op.format == CacheFormat::U8 { &buffer.written } else { &buffer.ready })?;
        let [_, row_bytes] = division.cached_rows();
        for (i, to) in op.cache_writes() {
            let Some(frame) = to.host else { continue };
            let to = HostRows { frame, row_bytes, rows: own };
            match division.rows_of(band, BandPart::NewHostColumns(i)) {
                Some(from) => host.offload_rows(self.gpu, self.block, from.offset, &to)?,
                None => {
                    let from = division.input_rows(band, i);
                    host.offload_columns(self.gpu, self.block, from, &to)?;
                }
            }
        }
        let by = rows::output_rows(&op.layout);
        for (i, frame) in op.frames.iter().enumerate() {
            let Some(frame) = host_frame(frame.out) else { continue };
            if let Some(from) = division.rows_of(band, BandPart::Output(i)) {
                host.download.wait_for(&buffer.computed)?;
                let rows = own.start * by..own.end * by;
                let to = HostRows { frame, row_bytes: from.row_bytes, rows: &rows };
                host.offload_rows(self.gpu, self.block, from.offset, &to)?;
            }
        }
        host.download.record(&buffer.offloaded)
    }
}

/// What all bands of an operation share.
fn conv_launch<'a>(
    op: &'a BandedConvOp<Offsets>,
    partial_sums: &'a PartialSums<Offsets>,
    scratch: u64,
) -> ConvLaunch<'a> {
    ConvLaunch { layout: &op.layout, input: op.input, statistics: op.statistics, scratch, partial_sums }
}

/// Where a frame that rematerialises others is read: in place, or normalised, if there are normalised ones.
fn read_at(frame: DeviceOffset, normalised: &[(DeviceOffset, DeviceOffset)]) -> Result<DeviceOffset> {
    match normalised.iter().find(|(from, _)| *from == frame) {
        Some((_, part)) => Ok(*part),
        None if normalised.is_empty() => Ok(frame),
        None => Err(Error::Internal("a frame is to be rematerialised from one that is not normalised".into())),
    }
}
