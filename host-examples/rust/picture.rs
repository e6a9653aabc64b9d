//! Draws the timeline of a plan as SVG. Knows the JSON of `vvae_plan_timeline`, and no library.

use std::fmt::Write;

use serde_json::Value;

const WIDTH: f64 = 1200.0;
/// Where panels begin and end from left to right.
const LEFT: f64 = 92.0;
const RIGHT: f64 = WIDTH - 24.0;
const LANE: f64 = 16.0;
const GIB: f64 = (1u64 << 30) as f64;
/// Names, colours and meanings of what lies in memory, in the order of the legend.
const CONTENTS: [(&str, &str, &str); 8] = [
    ("activations", "#4c8dd9", "activations"),
    ("causal cache", "#e8912d", "causal caches"),
    ("partial sums", "#b5651d", "partial sums"),
    ("weights", "#7f7fae", "weights"),
    ("scratch", "#c94f7c", "scratch"),
    ("band buffers", "#57b894", "band buffers"),
    ("staging", "#c9b037", "staging"),
    ("page tables", "#999999", "page tables"),
];
/// What takes a smaller share of its memory is not in the legend.
const LEAST_SHARE: f64 = 300.0;
/// Of the stages of a network, from the input on.
const STAGES: [&str; 4] = ["#1f4e79", "#2f77b4", "#62a5d9", "#a9d0ef"];
const UP: &str = "#d1495b";
const DOWN: &str = "#8d4fb0";
const STYLE: &str = "<style>text{font:13px system-ui,'DejaVu Sans',sans-serif;fill:#222}.b{fill:#fff}.p{fill:#f4f5f7}\
    .h{font-size:18px;font-weight:600}.s{fill:#666}.g{stroke:#8884;fill:none}.l{stroke:#d00;stroke-width:2;\
    stroke-dasharray:7 4}.r{fill:#d00;font-weight:600}.k{stroke:#fff;stroke-width:.4}@media(prefers-color-scheme:dark){\
    text{fill:#ddd}.b{fill:#14171c}.p{fill:#1d222a}.s{fill:#9aa}.r{fill:#ff6b6b}.l{stroke:#ff6b6b}.k{stroke:#14171c}}\
    </style>";

/// A picture of every device's timeline, one below the other.
pub fn plan(timeline: &Value) -> Result<String, String> {
    let devices = timeline["devices"].as_array().ok_or("the timeline has no list of devices")?;
    let (mut body, mut top) = (String::new(), 0.0);
    for device in devices {
        top = Device::read(device)?.draw(&mut body, top);
    }
    Ok(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {top}\" role=\"img\" aria-label=\"Memory and \
         copies of a plan over time\">{STYLE}<rect class=\"b\" width=\"{WIDTH}\" height=\"{top}\"/>{body}</svg>\n"
    ))
}

/// Makes the timeline of a stream that of a clip: of its length and time, and with no step after its last output frame.
pub fn end_with_clip(device: &mut Value, video: u64, outputs: u64, seconds: Option<f64>) {
    let key = if device["node"] == "encode" { "input" } else { "output" };
    device[key][2] = video.into();
    device["stream"] = true.into();
    if let Some(seconds) = seconds {
        device["seconds"] = seconds.into();
    }
    let steps = device["steps"].as_array().into_iter().flatten().enumerate();
    let mut stores = steps.filter(|(_, step)| step["name"] == "store");
    let Some((last, step)) = stores.nth(outputs.saturating_sub(1) as usize) else { return };
    let (end, last) = (number(step, "start") + number(step, "seconds"), last as u64);
    device["seconds_shown"] = end.into();
    device["complete"] = true.into();
    if let Some(steps) = device["steps"].as_array_mut() {
        steps.truncate(last as usize + 1);
    }
    if let Some(slots) = device["slots"].as_array_mut() {
        slots.retain(|slot| slot["first"].as_u64().is_some_and(|first| first <= last));
        slots.iter_mut().for_each(|slot| slot["last"] = slot["last"].as_u64().unwrap_or(last).min(last).into());
    }
}

/// One device's timeline.
struct Device<'a> {
    json: &'a Value,
    steps: &'a [Value],
    seconds: f64,
    /// Bytes a second of copies, as the steps have them.
    copies: f64,
}

fn number(of: &Value, key: &str) -> f64 {
    of[key].as_f64().unwrap_or(0.0)
}

fn list<'a>(of: &'a Value, key: &str) -> Result<&'a [Value], String> {
    of[key].as_array().map(Vec::as_slice).ok_or_else(|| format!("the timeline has no {key}"))
}

impl<'a> Device<'a> {
    fn read(json: &'a Value) -> Result<Device<'a>, String> {
        let steps = list(json, "steps")?;
        list(json, "slots").and(list(json, "fixed"))?;
        let rates = json["text"].as_str().unwrap_or_default().rsplit("copies=").next().unwrap_or_default();
        let copies = rates.trim().parse().unwrap_or(f64::INFINITY);
        Ok(Device { json, steps, seconds: number(json, "seconds_shown").max(f64::MIN_POSITIVE), copies })
    }

    fn x(&self, seconds: f64) -> f64 {
        LEFT + (RIGHT - LEFT) * (seconds / self.seconds).clamp(0.0, 1.0)
    }

    /// Start of a step, and its end.
    fn times(&self, first: &Value, last: &Value) -> (f64, f64) {
        let step = |index: &Value| self.steps.get(index.as_u64().unwrap_or(0) as usize);
        let (first, last) = (step(first), step(last));
        let end = last.map_or(0.0, |step| number(step, "start") + number(step, "seconds"));
        (first.map_or(0.0, |step| number(step, "start")), end)
    }

    /// Returns where the next device begins.
    fn draw(&self, to: &mut String, top: f64) -> f64 {
        let mut y = self.title(to, top + 30.0);
        y = self.legend(to, y + 22.0);
        y = self.lanes(to, y + 18.0);
        let bytes = number(self.json, "device_bytes");
        y = self.memory(to, y + 34.0, ("device", self.memory_name()), bytes, number(self.json, "limit_bytes"), 330.0);
        let host = number(self.json, "host_bytes");
        if host > 0.0 {
            let height = if host > bytes / 8.0 { 200.0 } else { 40.0 };
            y = self.memory(to, y + 40.0, ("host", "host memory"), host, number(self.json, "host_limit_bytes"), height);
        }
        self.time_axis(to, y) + 20.0
    }

    fn title(&self, to: &mut String, y: f64) -> f64 {
        let shape = |key: &str| -> Vec<u64> {
            self.json[key].as_array().into_iter().flatten().filter_map(Value::as_u64).collect()
        };
        let node = self.json["node"].as_str().unwrap_or_default();
        let video = if node == "encode" { shape("input") } else { shape("output") };
        let [batch, _, frames, height, width] = video.try_into().unwrap_or([1, 3, 0, 0, 0]);
        let clips = if batch > 1 { format!("{batch} clips of ") } else { String::new() };
        let length = if frames > 0 { format!("{frames} frames of ") } else { "a stream of ".into() };
        let manner = if self.json["stream"] == true { " as a stream" } else { "" };
        let device = match self.json["absent"].as_str() {
            Some(name) => format!("{}, an estimate by its published rates", escape(name)),
            None => escape(self.json["device"].as_str().unwrap_or_default()),
        };
        let bytes = size(number(self.json, "device_bytes"));
        let host = match number(self.json, "host_bytes") {
            0.0 => String::new(),
            host => format!(", {} of host memory", size(host)),
        };
        let tiles = if self.json["exact"] == false { ", in tiles" } else { "" };
        let (whole, shown) = (number(self.json, "seconds"), self.seconds);
        let time = match self.json["complete"] == true {
            true => format!("about {}", duration(whole)),
            false if whole > 0.0 => format!("about {}; shown are the first {}", duration(whole), duration(shown)),
            false => format!("shown are the first {}", duration(shown)),
        };
        let _ = write!(
            to,
            "<text class=\"h\" x=\"20\" y=\"{y}\">{node} {clips}{length}{width} x {height}{manner} on {device}</text>\
             <text class=\"s\" x=\"20\" y=\"{:.0}\">{bytes} of {}{host}{tiles}, {time}</text>",
            y + 22.0,
            self.memory_name()
        );
        y + 22.0
    }

    /// A CPU computes in the host's memory.
    fn memory_name(&self) -> &'static str {
        if self.json["device"].as_str().is_some_and(|id| id.starts_with("cpu")) {
            "host memory"
        } else {
            "device memory"
        }
    }

    /// Names what is in the picture, and nothing else.
    fn legend(&self, to: &mut String, y: f64) -> f64 {
        let least = |of: &Value| {
            number(self.json, if of["memory"] == "host" { "host_bytes" } else { "device_bytes" }) / LEAST_SHARE
        };
        let has = |name: &str| {
            let named = |of: &Value| of["content"] == name && number(of, "bytes") > least(of);
            let lists = [&self.json["slots"], &self.json["fixed"]];
            lists.iter().any(|list| list.as_array().is_some_and(|all| all.iter().any(named)))
        };
        let mut x = 20.0;
        for (name, colour, words) in CONTENTS.iter().filter(|(name, ..)| has(name)) {
            let _ = write!(
                to,
                "<rect x=\"{x}\" y=\"{:.0}\" width=\"14\" height=\"14\" rx=\"2\" fill=\"{colour}\" data-content=\"{name}\"/>\
                 <text x=\"{}\" y=\"{y}\">{words}</text>",
                y - 12.0,
                x + 19.0
            );
            x += 40.0 + 7.4 * words.len() as f64;
        }
        let stages = self.stage_count();
        x = RIGHT - 14.0 * stages as f64 - 170.0;
        let _ = write!(to, "<text class=\"s\" x=\"{x}\" y=\"{y}\">compute: first stage</text>");
        x += 138.0;
        for stage in 0..stages {
            let (at, colour) = (x + 14.0 * stage as f64, STAGES[stage.min(STAGES.len() - 1)]);
            let _ = write!(to, "<rect x=\"{at}\" y=\"{}\" width=\"14\" height=\"14\" fill=\"{colour}\"/>", y - 12.0);
        }
        let _ = write!(to, "<text class=\"s\" text-anchor=\"end\" x=\"{RIGHT}\" y=\"{y}\">last</text>");
        y
    }

    fn stage_count(&self) -> usize {
        1 + self.steps.iter().filter_map(|step| step["stage"].as_u64()).max().unwrap_or(0) as usize
    }

    /// Computation by stage, and copies beside it.
    fn lanes(&self, to: &mut String, top: f64) -> f64 {
        let mut lanes = vec![("compute", LANE * 1.4, None)];
        let moves = |key: &str| self.steps.iter().any(|step| number(step, key) > 0.0);
        if moves("bytes_up") {
            lanes.push(("to device", LANE, Some(("bytes_up", UP))));
        }
        if moves("bytes_down") {
            lanes.push(("to host", LANE, Some(("bytes_down", DOWN))));
        }
        let mut y = top;
        for (name, height, copies) in lanes {
            let _ = write!(
                to,
                "<text class=\"s\" text-anchor=\"end\" x=\"{}\" y=\"{:.1}\">{name}</text><rect class=\"p\" x=\"{LEFT}\" \
                 y=\"{y:.1}\" width=\"{}\" height=\"{height:.1}\"/>",
                LEFT - 8.0,
                y + height / 2.0 + 4.5,
                RIGHT - LEFT
            );
            match copies {
                None => self.stages(to, y, height),
                Some((key, colour)) => {
                    let copy = |step: &Value| {
                        let start = number(step, "copies_start");
                        (start, start + number(step, key) / self.copies)
                    };
                    let moved = self.steps.iter().filter(|step| number(step, key) > 0.0).map(copy);
                    self.bars(to, y, height, colour, moved.collect());
                }
            }
            y += height + 4.0;
        }
        y
    }

    fn stages(&self, to: &mut String, y: f64, height: f64) {
        for stage in 0..self.stage_count() {
            let own = self.steps.iter().filter(|step| step["stage"] == stage && number(step, "seconds") > 0.0);
            let times = own.map(|step| (number(step, "start"), number(step, "start") + number(step, "seconds")));
            self.bars(to, y, height, STAGES[stage.min(STAGES.len() - 1)], times.collect());
        }
        let waits = self.steps.iter().filter(|step| number(step, "waited") > 0.0);
        let waits = waits.map(|step| (number(step, "start"), number(step, "start") + number(step, "waited")));
        self.bars(to, y, height, "#d00", waits.collect());
    }

    /// Bars of one lane. Those that touch are one.
    fn bars(&self, to: &mut String, y: f64, height: f64, colour: &str, mut times: Vec<(f64, f64)>) {
        times.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut joined: Vec<(f64, f64)> = Vec::new();
        for (start, end) in times.into_iter().map(|(start, end)| (self.x(start), self.x(end))) {
            match joined.last_mut() {
                Some(last) if start <= last.1 + 0.15 => last.1 = last.1.max(end),
                _ => joined.push((start, end)),
            }
        }
        if joined.is_empty() {
            return;
        }
        let _ = write!(to, "<path fill=\"{colour}\" d=\"");
        joined.iter().for_each(|(start, end)| rectangle(to, *start, y, end - start, height));
        to.push_str("\"/>");
    }

    /// One memory over time, with its limit as a line where that is near.
    fn memory(&self, to: &mut String, top: f64, (key, name): (&str, &str), bytes: f64, limit: f64, height: f64) -> f64 {
        let near = limit > 0.0 && limit < 1.6 * bytes;
        let scale = bytes.max(if near { limit } else { 0.0 }) * if near { 1.04 } else { 1.0 };
        let y = |at: f64| top + height * (1.0 - (at / scale).clamp(0.0, 1.0));
        let _ = write!(
            to,
            "<text x=\"{LEFT}\" y=\"{:.0}\">{name}</text><rect class=\"p\" x=\"{LEFT}\" y=\"{top:.1}\" width=\"{}\" \
             height=\"{height}\"/>",
            top - 8.0,
            RIGHT - LEFT
        );
        for (content, colour, _) in CONTENTS {
            let of = |list: &'a str| {
                let all = self.json[list].as_array().into_iter().flatten();
                all.filter(move |of| of["memory"] == key && of["content"] == content)
            };
            // Lines between rectangles would hide thin ones.
            let (mut path, mut thin) = (String::new(), String::new());
            for fixed in of("fixed") {
                let (offset, bytes) = (number(fixed, "offset"), number(fixed, "bytes"));
                rectangle(&mut thin, LEFT, y(offset + bytes), RIGHT - LEFT, y(offset) - y(offset + bytes));
            }
            for slot in of("slots") {
                let (offset, bytes) = (number(slot, "offset"), number(slot, "bytes"));
                let (start, end) = self.times(&slot["first"], &slot["last"]);
                let (start, end) = (self.x(start), self.x(end));
                let (width, height) = (end - start, y(offset) - y(offset + bytes));
                if width > 0.05 && height > 0.05 {
                    let to = if width.min(height) < 3.0 { &mut thin } else { &mut path };
                    rectangle(to, start, y(offset + bytes), width, height);
                }
            }
            for (class, path) in [(" class=\"k\"", path), ("", thin)].into_iter().filter(|(_, path)| !path.is_empty()) {
                let _ = write!(to, "<path{class} fill=\"{colour}\" d=\"{path}\"/>");
            }
        }
        let (unit, name) = if scale < GIB { (GIB / 1024.0, "MiB") } else { (GIB, "GiB") };
        let step = nice(scale / unit / (height / 45.0).max(1.0));
        for tick in (0..).map(|n| n as f64 * step).take_while(|at| at * unit <= scale) {
            let at = y(tick * unit);
            let _ = write!(
                to,
                "<path class=\"g\" d=\"M{LEFT} {at:.1}H{RIGHT}\"/><text class=\"s\" text-anchor=\"end\" x=\"{}\" \
                 y=\"{:.1}\">{} {name}</text>",
                LEFT - 8.0,
                at + 4.5,
                trimmed(tick)
            );
        }
        if near {
            let at = y(limit);
            let _ = write!(
                to,
                "<path class=\"l\" d=\"M{LEFT} {at:.1}H{RIGHT}\"/><text class=\"r\" text-anchor=\"end\" x=\"{RIGHT}\" \
                 y=\"{:.1}\">limit {}</text>",
                at - 6.0,
                size(limit)
            );
        } else if limit > 0.0 {
            let _ = write!(
                to,
                "<text class=\"s\" text-anchor=\"end\" x=\"{RIGHT}\" y=\"{:.0}\">limit {}, far above</text>",
                top - 8.0,
                size(limit)
            );
        }
        top + height
    }

    fn time_axis(&self, to: &mut String, y: f64) -> f64 {
        // As in `duration`.
        let unit = match self.seconds {
            s if s < 0.5 => ("ms", 1000.0),
            s if s < 100.0 => ("s", 1.0),
            s if s < 100.0 * 60.0 => ("min", 1.0 / 60.0),
            _ => ("h", 1.0 / 3600.0),
        };
        let step = nice(self.seconds * unit.1 / 10.0) / unit.1;
        for tick in (0..).map(|n| n as f64 * step).take_while(|at| *at <= self.seconds) {
            let x = self.x(tick);
            let _ = write!(
                to,
                "<path class=\"g\" d=\"M{x:.1} {y:.1}v5\"/><text class=\"s\" text-anchor=\"middle\" x=\"{x:.1}\" \
                 y=\"{:.1}\">{} {}</text>",
                y + 19.0,
                trimmed(tick * unit.1),
                unit.0
            );
        }
        let _ = write!(
            to,
            "<text class=\"s\" text-anchor=\"end\" x=\"{RIGHT}\" y=\"{:.1}\">estimated time</text>",
            y + 36.0
        );
        y + 36.0
    }
}

fn rectangle(path: &mut String, x: f64, y: f64, width: f64, height: f64) {
    let _ = write!(path, "M{} {}h{}v{}h-{}z", short(x), short(y), short(width), short(height), short(width));
}

/// Tenths of a pixel, without zeros.
fn short(value: f64) -> String {
    trimmed((value * 10.0).round() / 10.0)
}

fn trimmed(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

/// The next larger of 1, 2, 5, 10 and so on.
fn nice(least: f64) -> f64 {
    let power = 10f64.powf(least.max(1e-9).log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|n| n * power).find(|n| *n >= least * 0.999).unwrap_or(10.0 * power)
}

fn size(bytes: f64) -> String {
    match bytes {
        b if b < GIB => format!("{:.0} MiB", b / GIB * 1024.0),
        b if b < 100.0 * GIB => format!("{} GiB", trimmed((b / GIB * 100.0).round() / 100.0)),
        b => format!("{:.0} GiB", b / GIB),
    }
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 0.1 => format!("{:.0} ms", 1000.0 * s),
        s if s < 100.0 => format!("{s:.1} s"),
        s if s < 100.0 * 60.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
