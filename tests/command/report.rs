//! What the command draws and writes for people: the report's page in a real browser, the plan's picture, the trace.

use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::Duration;

use crate::common::safetensors::Folder;
use crate::common::{root, small};
use serde_json::{Value, json};

/// The command beside this test.
fn run(arguments: &[&str]) -> Output {
    let test = std::env::current_exe().unwrap();
    let examples = test.ancestors().nth(2).unwrap().join("examples");
    let mut command = Command::new(examples.join("vvae").with_extension(std::env::consts::EXE_EXTENSION));
    command.args(arguments).env_remove("VIDEO_VAE_LIBRARY").output().unwrap()
}

fn vvae_words(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// What it said, on the CPU.
fn vvae(arguments: &[&str]) -> String {
    vvae_words(&[arguments, &["--device", "cpu"]].concat())
}

/// What it refused.
fn refused(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert!(!output.status.success(), "{arguments:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn plan_draws_a_picture() {
    let folder = Folder::new("picture");
    let (weights, path) = (small(), folder.0.join("plan.svg"));
    let said = vvae(&[
        "plan",
        "--encode",
        "9x80x96",
        "--decode",
        "9x80x96",
        "--picture",
        text(&path),
        "--weights",
        text(&weights),
    ]);
    assert!(said.contains("plan.svg"), "{said}");
    let svg = std::fs::read_to_string(&path).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    for words in
        ["encode 9 frames of 96 x 80", "decode 9 frames of 96 x 80", "causal caches", "estimated time", "limit"]
    {
        assert!(svg.contains(words), "{words} in {svg}");
    }
}

#[test]
fn roundtrip_writes_a_report_and_a_trace() {
    let folder = Folder::new("report");
    let frame = |i: u8| b"FRAME\n".iter().copied().chain((0..96 * 80 * 3 / 2).map(move |n| (n % 97) as u8 + i));
    let frames: Vec<u8> = (0..6).flat_map(frame).collect();
    let clip = folder.file("a<b>{{plans}}.y4m", &[b"YUV4MPEG2 W96 H80 F25:1 C420jpeg\n".to_vec(), frames].concat());
    let [out, page, trace] = ["out.y4m", "report.html", "trace.json"].map(|name| folder.0.join(name));
    let weights = small();
    let settings = ["--report", text(&page), "--trace", text(&trace), "--weights", text(&weights)];
    vvae(&[&["roundtrip", text(&clip), text(&out)], &settings[..]].concat());
    let html = std::fs::read_to_string(&page).unwrap();
    assert!(html.contains("6 frames of 96x80") && html.contains("data-frames=\"6\""));
    assert!(!html.contains("a<b>") && !html.contains("{{"), "names are text, not markup");
    assert_eq!(html.matches("data:image/svg+xml").count(), 2, "a plan for each direction");
    assert!(!html.contains("http://") && !html.contains("https://"), "nothing is fetched");
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(&trace).unwrap()).unwrap();
    let names: Vec<_> = trace["traceEvents"].as_array().unwrap().iter().filter_map(|e| e["name"].as_str()).collect();
    assert!(names.iter().any(|n| n.contains("encoder")) && names.iter().any(|n| n.contains("decoder")), "{names:?}");
    // Compared with itself, and with what came out: the first page is not replaced unasked.
    let compared = folder.0.join("compared.html");
    let said = vvae_words(&["compare", text(&clip), text(&out), "--report", text(&compared)]);
    assert!(said.contains("PSNR") && std::fs::read_to_string(&compared).unwrap().contains("data-frames=\"6\""));
    let why = refused(&["compare", text(&clip), text(&out), "--report", text(&compared)]);
    assert!(why.contains("exists") && why.contains("-y"), "{why}");
}

/// A headless Chromium, spoken to through chromedriver.
struct Browser {
    driver: Child,
    port: u16,
    session: String,
    profile: Folder,
    /// The driver ends when nobody reads what it says.
    _said: Lines<BufReader<ChildStdout>>,
}

impl Browser {
    /// `None` if it is not installed.
    fn start() -> Option<Browser> {
        if Command::new("chromedriver").arg("--version").output().is_err() {
            assert!(std::env::var_os("CI").is_none(), "no chromedriver");
            println!("skipped: no chromedriver; apt-get install chromium chromium-driver");
            return None;
        }
        // The driver takes a free port of IPv4. It ends if another program has that port in IPv6.
        let mut all_said = Vec::new();
        let started = (0..5).find_map(|_| Browser::start_driver(&mut all_said));
        let (driver, port, said) = started.unwrap_or_else(|| panic!("chromedriver names no port: {all_said:#?}"));
        let profile = Folder::new("chromium");
        let mut browser = Browser { driver, port, session: String::new(), profile, _said: said };
        let switches = ["headless=new", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking"];
        let mut switches: Vec<String> = switches.iter().map(|switch| format!("--{switch}")).collect();
        switches.push(format!("--user-data-dir={}", browser.profile.0.display()));
        switches.extend(["--disable-component-update", "--disable-sync", "--hide-scrollbars"].map(String::from));
        let options = json!({ "args": switches });
        let asked = json!({ "capabilities": { "alwaysMatch": { "goog:chromeOptions": options } } });
        let made = browser.ask("POST", "/session", &asked);
        browser.session = format!("/session/{}", made["sessionId"].as_str().unwrap());
        Some(browser)
    }

    /// The driver, its port, and what it says from then on; `None` if it ends before it names a port.
    fn start_driver(all_said: &mut Vec<String>) -> Option<(Child, u16, Lines<BufReader<ChildStdout>>)> {
        let mut driver = Command::new("chromedriver");
        let mut driver = driver.arg("--port=0").stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(driver.stdout.take().unwrap()).lines();
        for line in lines.by_ref().map_while(Result::ok) {
            if let Some((_, port)) = line.split_once("successfully on port ") {
                return Some((driver, port.trim_end_matches('.').parse().unwrap(), lines));
            }
            all_said.push(line);
        }
        driver.wait().unwrap();
        None
    }

    fn ask(&self, method: &str, path: &str, body: &Value) -> Value {
        let (head, body) = self.send(method, path, body).unwrap_or_else(|why| panic!("{method} {path}: {why}"));
        assert!(head.starts_with("HTTP/1.1 200"), "{method} {path}: {head} {body}");
        serde_json::from_str::<Value>(&body).unwrap()["value"].take()
    }

    /// The first line of the answer, and its body. The driver keeps connections open, so its length is looked at.
    fn send(&self, method: &str, path: &str, body: &Value) -> std::io::Result<(String, String)> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(Duration::from_secs(240)))?;
        let body = if method == "POST" { body.to_string() } else { String::new() };
        let head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n");
        write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len())?;
        let mut answer = BufReader::new(stream);
        let (mut first, mut line, mut length) = (String::new(), String::new(), 0);
        answer.read_line(&mut first)?;
        while answer.read_line(&mut line)? > 2 {
            let (name, value) = line.split_once(':').unwrap_or_default();
            if name.eq_ignore_ascii_case("content-length") {
                length = value.trim().parse().unwrap_or(0);
            }
            line.clear();
        }
        let mut body = vec![0; length];
        answer.read_exact(&mut body)?;
        Ok((first, String::from_utf8_lossy(&body).into_owned()))
    }

    fn post(&self, path: &str, body: Value) -> Value {
        self.ask("POST", &format!("{}{path}", self.session), &body)
    }

    /// The path of an element.
    fn find(&self, selector: &str) -> String {
        let found = self.post("/element", json!({ "using": "css selector", "value": selector }));
        let id = found.as_object().unwrap().values().next().unwrap();
        format!("/element/{}", id.as_str().unwrap())
    }

    fn script(&self, script: &str) -> Value {
        self.post("/execute/sync", json!({ "script": script, "args": [] }))
    }

    /// What an element looks like.
    fn look(&self, element: &str) -> String {
        let picture = self.ask("GET", &format!("{}{element}/screenshot", self.session), &Value::Null);
        picture.as_str().unwrap().to_owned()
    }

    fn keys(&self, element: &str, keys: &str) {
        self.post(&format!("{element}/value"), json!({ "text": keys }));
    }

    fn resize(&self, width: u32, height: u32) {
        // A window has a least width; the size of the page itself has none.
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500 });
        let command = json!({ "cmd": "Emulation.setDeviceMetricsOverride", "params": size });
        self.post("/goog/cdp/execute", command);
    }

    /// Keeps a picture of the whole window for people.
    fn keep(&self, name: &str) {
        let picture = self.ask("GET", &format!("{}/screenshot", self.session), &Value::Null);
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::write(path, picture.as_str().unwrap()).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Closes the browser, which would outlive its driver.
        let _ = self.send("DELETE", &self.session, &Value::Null);
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

/// Of arrow keys, as WebDriver has them.
const RIGHT: &str = "\u{e014}";

#[test]
fn the_report_works_in_a_browser() {
    let folder = Folder::new("demo");
    let said = vvae(&["demo", "--shape", "5x64x96", "--out", text(&folder.0)]);
    assert!(said.contains("report.html"), "{said}");
    let Some(browser) = Browser::start() else { return };
    browser.post("/url", json!({ "url": format!("file://{}", folder.0.join("report.html").display()) }));
    for (width, height, name) in [(1200, 1400, "report-desktop.png.base64"), (390, 844, "report-phone.png.base64")] {
        browser.resize(width, height);
        let pictures = "return [...document.images].every(i => i.complete && i.naturalWidth > 0)";
        assert_eq!(browser.script(pictures), true, "every picture is there");
        let wide = browser.script("return document.documentElement.scrollWidth");
        assert_eq!(wide.as_u64(), Some(width.into()), "the page fits the window");
        browser.keep(name);
    }
    let (stage, slider, frame) = (browser.find("#stage"), browser.find("#slider"), browser.find("#frame"));
    // Focused by keys first, so that its outline is in every picture.
    browser.keys(&slider, RIGHT);
    let first = browser.look(&stage);
    assert_eq!(first, browser.look(&stage), "nothing moves by itself");
    browser.keys(&slider, &RIGHT.repeat(20));
    let moved = browser.look(&stage);
    assert_ne!(first, moved, "the slider shows more of the one clip");
    browser.post(&format!("{}/click", browser.find("#difference")), json!({}));
    assert_ne!(moved, browser.look(&stage), "the difference is shown");
    let told = || browser.script("return document.getElementById('told').textContent").as_str().unwrap().to_owned();
    assert!(told().starts_with("0, "), "{}", told());
    browser.keys(&frame, RIGHT);
    assert!(told().starts_with("1, "), "{}", told());
    let fetched = "return performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:')).length";
    assert_eq!(browser.script(fetched), 0, "the page is one file");
    let names = browser.script(
        "return [...document.querySelectorAll('input')].every(i => i.closest('label') || i.getAttribute('aria-label'))",
    );
    assert_eq!(names, true, "every control has a name");
}

#[test]
fn plots_are_current() {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let Ok(run) = Command::new(&python).arg(root().join("docs/plots.py")).arg("--check").output() else {
        assert!(std::env::var_os("CI").is_none(), "no {python}");
        println!("skipped: no {python}");
        return;
    };
    let said = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{said}");
}
