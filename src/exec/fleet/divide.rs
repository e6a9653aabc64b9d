//! Divides clips and frames among the members of a fleet. Pure arithmetic over speeds and the cost of a cut; must not
//! know devices.

use std::ops::Range;

use crate::report::Part;

/// What it costs to begin with a frame of a clip, in frames' worth of work.
pub type CutCost<'a> = dyn Fn(u64) -> f64 + 'a;

impl Part {
    /// Its cost in frames, cuts included.
    pub fn cost(&self, cut: &CutCost) -> f64 {
        self.clip_count() as f64 * (self.frame_count() as f64 + cut(self.frames.start))
    }
}

/// The clips of a part one after the other: each member computes a span of this line, so that cuts fall between clips
/// where they can.
struct Line<'a> {
    part: &'a Part,
    cut: &'a CutCost<'a>,
    /// Cuts within a clip fall on multiples of this.
    step: u64,
}

/// The parts of each member: those that all finish at the same time, by members of these speeds (frames a second; 0: of
/// no use). A member whose frames would not pay for its cut gets none. Cuts within a clip fall on multiples of `step`.
pub fn divide(part: &Part, speeds: &[f64], cut: &CutCost, step: u64) -> Vec<Vec<Part>> {
    let line = Line { part, cut, step };
    let slowest = speeds.iter().copied().filter(|speed| *speed > 0.0).fold(f64::INFINITY, f64::min);
    // Any member alone is as fast as this.
    let (mut low, mut high) = (0.0, 1.001 * (part.cost(cut) + 1.0) / slowest);
    for _ in 0..60 {
        let seconds = (low + high) / 2.0;
        match line.spans(speeds, seconds) {
            Some(_) => high = seconds,
            None => low = seconds,
        }
    }
    let spans = line.spans(speeds, high).unwrap_or_default();
    spans.into_iter().map(|span| line.parts(span)).collect()
}

/// Seconds of the member that takes longest.
pub fn seconds(division: &[Vec<Part>], speeds: &[f64], cut: &CutCost) -> f64 {
    let cost = |parts: &Vec<Part>| parts.iter().map(|part| part.cost(cut)).sum::<f64>();
    let busy = division.iter().zip(speeds).filter(|(parts, _)| !parts.is_empty());
    busy.map(|(parts, speed)| cost(parts) / speed).fold(0.0, f64::max)
}

impl Line<'_> {
    /// Cost of a cut before this frame of a clip.
    fn cut(&self, frame: u64) -> f64 {
        (self.cut)(self.part.frames.start + frame)
    }

    /// What each member reaches in so many seconds; `None` if something is left.
    fn spans(&self, speeds: &[f64], seconds: f64) -> Option<Vec<Range<u64>>> {
        let mut at = 0;
        let spans = speeds.iter().map(|speed| {
            let from = at;
            at = self.reach(from, seconds * speed);
            from..at
        });
        let spans = spans.collect();
        (at == self.part.all_frames()).then_some(spans)
    }

    /// How far a member comes from `from` on with work for so many frames.
    fn reach(&self, from: u64, work: f64) -> u64 {
        let (frames, start, length) = (self.part.frame_count(), from % self.part.frame_count(), self.part.all_frames());
        let cut = self.cut(start);
        if from == length || work <= cut {
            return from;
        }
        let rest_of_clip = frames - start;
        let end = match work - cut - rest_of_clip as f64 {
            left if left < 0.0 => from + (work - cut) as u64,
            left => {
                let (begin, clip) = (self.cut(0), frames as f64 + self.cut(0));
                let clips = (left / clip).floor();
                let head = (left - clips * clip - begin).max(0.0);
                (from + rest_of_clip).saturating_add((clips as u64).saturating_mul(frames)).saturating_add(head as u64)
            }
        };
        let end = self.worthwhile(from, self.on_step(from, end.min(length)));
        let pays = start == 0 || (end - from).min(rest_of_clip) as f64 >= cut;
        if pays { end } else { from }
    }

    /// The end of a span, moved back to a multiple of the step.
    fn on_step(&self, from: u64, end: u64) -> u64 {
        let earlier = end - end % self.part.frame_count() % self.step;
        if earlier > from { earlier } else { end }
    }

    /// The end of a span, moved back to where the next member's cut pays.
    fn worthwhile(&self, from: u64, end: u64) -> u64 {
        let frames = self.part.frame_count();
        if end.is_multiple_of(frames) {
            return end;
        }
        let left = frames - end % frames;
        let least = self.cut(end % frames).ceil() as u64;
        let end = end.saturating_sub(least.saturating_sub(left)).max(from);
        let head = end % frames;
        // The next member would compute all of this head again.
        let repeated = head > 0 && end - head >= from && self.cut(head) >= head as f64 + self.cut(0);
        if repeated { end - head } else { end }
    }

    /// A span as at most three parts: the rest of a clip, whole clips, the beginning of one.
    fn parts(&self, span: Range<u64>) -> Vec<Part> {
        let (frames, first) = (self.part.frame_count(), self.part.frames.start);
        let mut parts: Vec<Part> = Vec::new();
        let mut at = span.start;
        while at < span.end {
            let (clip, start) = (self.part.clips.start + at / frames, at % frames);
            let clips = if start == 0 { ((span.end - at) / frames).max(1) } else { 1 };
            let end = frames.min(start + span.end - at);
            parts.push(Part { clips: clip..clip + clips, frames: first + start..first + end });
            at += clips * (end - start);
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Lcg;

    /// A cut costs `cost` frames, but no more than there are before it.
    fn cut(cost: f64) -> impl Fn(u64) -> f64 {
        move |frame| cost.min(frame as f64)
    }

    fn clips(clips: u64, frames: u64) -> Part {
        Part { clips: 0..clips, frames: 0..frames }
    }

    /// Every frame of every clip is in exactly one part.
    fn check_complete(whole: &Part, division: &[Vec<Part>]) {
        let mut times = vec![0; (whole.clip_count() * whole.frame_count()) as usize];
        for part in division.iter().flatten() {
            for clip in part.clips.clone() {
                for frame in part.frames.clone() {
                    let at = (clip - whole.clips.start) * whole.frame_count() + frame - whole.frames.start;
                    times[at as usize] += 1;
                }
            }
        }
        assert!(times.iter().all(|times| *times == 1), "{whole:?}: {division:?}");
    }

    #[test]
    fn every_frame_has_one_member_whatever_the_speeds() {
        let mut numbers = Lcg(3);
        let mut random = |below: u64| numbers.bits() % below;
        for _ in 0..2000 {
            let (clip, frame) = (random(3), random(50));
            let whole = Part { clips: clip..clip + 1 + random(9), frames: frame..frame + 1 + random(400) };
            let mut speeds: Vec<f64> = (0..1 + random(9)).map(|_| random(5) as f64 * 0.37).collect();
            speeds[0] = 1.0;
            let (cost, step) = (cut(random(60) as f64), [1, 2, 8][random(3) as usize]);
            let division = divide(&whole, &speeds, &cost, step);
            assert_eq!(division.len(), speeds.len());
            check_complete(&whole, &division);
            for (parts, speed) in division.iter().zip(&speeds) {
                assert!(parts.len() <= 3 && (*speed > 0.0 || parts.is_empty()));
                let pays = |part: &Part| part.frame_count() as f64 >= cost(part.frames.start);
                assert!(parts.iter().all(|part| part.frames.start == frame || pays(part)), "{whole:?} {parts:?}");
            }
        }
    }

    #[test]
    fn cuts_on_a_step_make_parts_alike() {
        let division = divide(&clips(1, 2001), &[1.0; 16], &cut(26.0), 8);
        check_complete(&clips(1, 2001), &division);
        assert!(division.iter().all(|parts| parts[0].frames.start.is_multiple_of(8)));
        assert!(division[1..15].iter().all(|parts| parts[0].frame_count() == division[1][0].frame_count()));
    }

    #[test]
    fn members_finish_together() {
        let division = divide(&clips(1, 1000), &[1.0, 3.0, 0.0, 2.0], &cut(20.0), 1);
        let ends: Vec<_> = division.iter().map(|parts| parts.first().map(|part| part.frames.clone())).collect();
        // 1000 frames and two cuts at 6 frames a second.
        assert_eq!(ends, [Some(0..173), Some(173..673), None, Some(673..1000)]);
    }

    #[test]
    fn batches_are_divided_between_clips() {
        let parts = |clips: Range<u64>, frames: Range<u64>| Part { clips, frames };
        assert_eq!(divide(&clips(4, 81), &[1.0, 1.02], &cut(20.0), 1), [[parts(0..2, 0..81)], [parts(2..4, 0..81)]]);
        let three = divide(&clips(3, 81), &[1.0, 1.0], &cut(20.0), 1);
        assert_eq!(three[0], [parts(0..1, 0..81), parts(1..2, 0..51)]);
        assert_eq!(three[1], [parts(1..2, 51..81), parts(2..3, 0..81)]);
    }

    #[test]
    fn what_does_not_pay_for_its_cut_is_not_divided() {
        assert_eq!(divide(&clips(1, 43), &[1.0, 1.0], &cut(22.0), 1)[1], []);
        assert_eq!(divide(&clips(1, 60), &[1.0, 1.0], &cut(22.0), 1)[1], [Part { clips: 0..1, frames: 38..60 }]);
        assert_eq!(divide(&clips(1, 500), &[1.0, 0.01], &cut(22.0), 1)[1], [], "a slow member would take longer alone");
        assert_eq!(divide(&clips(1, 500), &[0.01, 1.0], &cut(22.0), 1)[1].len(), 1, "not the fast one");
    }

    /// Scaling by what an H200 takes at 1080p, measured: 0.0662 s for a decoded frame, 26.1 of them for a cut.
    #[test]
    fn decoding_scales_to_many_devices() {
        const FRAME: f64 = 0.0662;
        println!("decode, 1080p: devices, frames, seconds, times as fast, efficiency");
        let speedup = |devices: usize, frames: u64| {
            let (speeds, cost) = (vec![1.0 / FRAME; devices], cut(26.1));
            let division = divide(&clips(1, frames), &speeds, &cost, 1);
            check_complete(&clips(1, frames), &division);
            let took = seconds(&division, &speeds, &cost);
            let times = frames as f64 * FRAME / took;
            println!("{devices:4} {frames:6} {took:8.2} {times:6.2} {:4.0} %", 100.0 * times / devices as f64);
            times
        };
        for frames in [201, 1001, 10_001] {
            for devices in [1, 2, 4, 8, 16, 32, 64] {
                assert!(speedup(devices, frames) <= devices as f64);
            }
        }
        assert!(speedup(8, 1001) >= 6.5);
        assert!(speedup(64, 10_001) >= 50.0);
    }
}
