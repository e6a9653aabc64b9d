//! `vvae get` against a hub on this machine: what is asked, what is kept, and what a user is told.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::common::command::{names, text, vvae};
use crate::common::hub::{Answer, Hub, Request};
use crate::common::{root, small};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// The name of a model whose checksum is not known beforehand, and its repository's folder in the hub's cache.
const NAME: &str = "flux";
const FOLDER: &str = "models--Comfy-Org--z_image_turbo";
const PATH: &str = "split_files/vae/ae.safetensors";

fn contents() -> Vec<u8> {
    std::fs::read(small()).expect("the small checkpoint")
}

/// SHA-256 by the command itself, which `info` prints.
fn sum() -> String {
    static SUM: OnceLock<String> = OnceLock::new();
    let ask = || {
        let said = crate::common::command::succeeds(&["info", text(&small())]);
        said.lines().find_map(|line| line.trim().strip_prefix("sha-256")).expect("a sum").trim().to_owned()
    };
    SUM.get_or_init(ask).clone()
}

fn temporary(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("vvae-get-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

/// The answer to HEAD, as the hub gives it for large files.
fn described(address: &str) -> Answer {
    let size = contents().len().to_string();
    let answer = Answer::status("302 Found").with("location", address).with("x-linked-size", &size);
    answer.with("x-linked-etag", &format!("\"{}\"", sum())).with("x-repo-commit", COMMIT)
}

/// A hub that describes the file as it is, and gives the contents in its own way.
fn hub(give: impl Fn(&Request) -> Answer + Send + 'static) -> Hub {
    let head = described("/cdn/file").head;
    Hub::start(move |request| match request.line.split(' ').collect::<Vec<_>>()[..] {
        ["HEAD", ..] => Answer { head: head.clone(), body: Vec::new(), hangs: false },
        [_, path, _] if path.starts_with("/cdn") => give(request),
        _ => Answer::status("302 Found").with("location", "/cdn/file"),
    })
}

/// The command with nothing of this machine's environment.
fn get(words: &[&str], endpoint: &str, home: &Path) -> Command {
    let mut command = vvae(&[&["get"], words].concat());
    for name in ["HF_TOKEN", "HF_HUB_CACHE", "ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "XDG_CACHE_HOME"] {
        command.env_remove(name).env_remove(name.to_lowercase());
    }
    command.env("HF_ENDPOINT", endpoint).env("HF_HOME", home).stdin(Stdio::null());
    command
}

#[track_caller]
fn succeeds(mut command: Command) -> String {
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{command:?}: {}", error(&output));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Fails with one line that has these words.
#[track_caller]
fn fails(mut command: Command, said: &[&str]) {
    let output = command.output().expect("it starts");
    assert!(!output.status.success(), "{command:?} succeeded");
    let error = error(&output);
    assert!(error.starts_with("vvae: ") && error.lines().count() == 1, "{error}");
    said.iter().for_each(|word| assert!(error.contains(word), "{word:?} is not in: {error}"));
}

fn error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Where the file is in the hub's cache.
fn cached(home: &Path) -> PathBuf {
    home.join("hub").join(FOLDER).join("snapshots").join(COMMIT).join(PATH)
}

#[test]
fn a_checkpoint_is_downloaded_and_found_by_its_name() {
    let home = temporary("whole");
    let hub = hub(|request| Answer::contents(&contents(), request.first()));
    let said = succeeds(get(&[NAME, "--yes"], &hub.address(), &home));
    for words in ["FLUX.1", "Apache-2.0", "Comfy-Org/z_image_turbo", "SHA-256 checked", "--weights flux"] {
        assert!(said.contains(words), "{words:?} is not in: {said}");
    }
    assert_eq!(std::fs::read(cached(&home)).expect("the file"), contents());
    assert_eq!(std::fs::read_to_string(home.join("hub").join(FOLDER).join("refs/main")).expect("a version"), COMMIT);
    assert_eq!(names(&home.join("hub").join(FOLDER).join("blobs")), [sum()]);
    // The same file by its name, for every command.
    let info = vvae(&["info", NAME]).env("HF_HOME", &home).output().expect("it starts");
    assert!(String::from_utf8_lossy(&info.stdout).contains(&sum()), "{}", error(&info));
    let plan = vvae(&["plan", "--decode", "1x64x64", "--weights", NAME]).env("HF_HOME", &home).output();
    assert!(plan.expect("it starts").status.success());
    // A second time there is nothing to do, and nothing is asked.
    let asked = hub.asked().len();
    assert!(succeeds(get(&[NAME], &hub.address(), &home)).contains("here already"));
    assert!(succeeds(get(&[], &hub.address(), &home)).contains(text(&cached(&home))));
    assert_eq!(hub.asked().len(), asked);
    let _ = std::fs::remove_dir_all(home);
}

#[test]
fn the_token_goes_to_the_hub_alone() {
    let home = temporary("token");
    let elsewhere = Hub::start(|request| Answer::contents(&contents(), request.first()));
    let address = format!("http://localhost:{}/file", elsewhere.port);
    let (head, location) = (described(&address).head, address.clone());
    let hub = Hub::start(move |request| match request.line.starts_with("HEAD") {
        true => Answer { head: head.clone(), body: Vec::new(), hangs: false },
        false => Answer::status("302 Found").with("location", &location),
    });
    let mut command = get(&[NAME, "--yes", "-q"], &hub.address(), &home);
    command.env("HF_TOKEN", "hf_secret");
    assert_eq!(succeeds(command), "");
    assert!(hub.asked().iter().all(|request| request.header("authorization") == Some("bearer hf_secret")));
    assert!(!elsewhere.asked().is_empty());
    assert!(elsewhere.asked().iter().all(|request| request.header("authorization").is_none()));
    let _ = std::fs::remove_dir_all(home);
}

#[test]
fn a_connection_that_breaks_is_continued() {
    let home = temporary("breaks");
    let hub = hub(|request| {
        let left = contents().len() - request.first().unwrap_or(0);
        Answer::contents(&contents(), request.first()).cut((left / 2).max(left.min(100_000)))
    });
    succeeds(get(&[NAME, "--yes"], &hub.address(), &home));
    assert_eq!(std::fs::read(cached(&home)).expect("the file"), contents());
    assert!(hub.asked().iter().filter(|request| request.first().is_some()).count() >= 2, "{:?}", hub.asked());
    let _ = std::fs::remove_dir_all(home);
}

#[test]
fn a_part_of_an_earlier_run_is_continued() {
    let home = temporary("part");
    let blobs = home.join("hub").join(FOLDER).join("blobs");
    let part = blobs.join(format!("{}.incomplete", sum()));
    let half = contents().len() / 2;
    std::fs::create_dir_all(&blobs).expect("a folder");
    std::fs::write(&part, &contents()[..half]).expect("the first half");
    let server = hub(|request| Answer::contents(&contents(), request.first()));
    succeeds(get(&[NAME, "--yes"], &server.address(), &home));
    assert_eq!(std::fs::read(cached(&home)).expect("the file"), contents());
    let asked: Vec<_> = server.asked().iter().filter(|it| it.line.contains("/cdn")).map(Request::first).collect();
    assert_eq!(asked, [Some(half)]);
    // A server that knows no ranges sends all of it; one byte too many is no part.
    for first in [&contents()[..half], &[&contents()[..], b"x"].concat()] {
        std::fs::remove_dir_all(home.join("hub")).expect("a folder");
        std::fs::create_dir_all(&blobs).expect("a folder");
        std::fs::write(&part, first).expect("a part");
        let whole = hub(|_| Answer::contents(&contents(), None));
        succeeds(get(&[NAME, "--yes"], &whole.address(), &home));
        assert_eq!(std::fs::read(cached(&home)).expect("the file"), contents());
    }
    let _ = std::fs::remove_dir_all(home);
}

#[test]
fn wrong_contents_are_removed() {
    let home = temporary("wrong");
    let hub = hub(|_| {
        let mut wrong = contents();
        wrong[1000] ^= 1;
        Answer::contents(&wrong, None)
    });
    fails(get(&[NAME, "--yes"], &hub.address(), &home), &["SHA-256", &sum(), "removed"]);
    assert!(names(&home.join("hub").join(FOLDER).join("blobs")).is_empty());
    fails(get(&["seedvr2", "--yes"], &hub.address(), &home), &["another", "20678548f420", "nothing was downloaded"]);
    let _ = std::fs::remove_dir_all(home);
}

#[test]
fn refusals_say_what_to_do() {
    let home = temporary("refused");
    for (status, remedy) in [
        ("401 Unauthorized", "set HF_TOKEN"),
        ("403 Forbidden", "licence"),
        ("404 Not Found", "--weights FILE"),
        ("503 Service Unavailable", "try again later"),
    ] {
        let hub = Hub::start(move |_| Answer::status(status));
        fails(get(&[NAME, "--yes"], &hub.address(), &home), &[&status[..3], remedy, "ae.safetensors"]);
    }
    let lost = hub(|_| Answer::status("404 Not Found"));
    fails(get(&[NAME, "--yes"], &lost.address(), &home), &["404"]);
    // Port 1 is nobody's.
    fails(get(&[NAME, "--yes"], "http://127.0.0.1:1", &home), &["cannot be reached", "HTTPS_PROXY", "HF_ENDPOINT"]);
    fails(get(&["sora", "--yes"], "http://127.0.0.1:1", &home), &["sora", "seedvr2", "qwen-image"]);
    let no_address = get(&["qwen-image-2.1", "--yes"], "http://127.0.0.1:1", &home);
    fails(no_address, &["qwen-image-2.1", "no address", "--weights FILE"]);
    let asks = hub(|_| Answer::contents(&contents(), None));
    fails(get(&[NAME], &asks.address(), &home), &["--yes"]);
    assert!(asks.asked().iter().all(|request| request.line.starts_with("HEAD")));
    let _ = std::fs::remove_dir_all(home);
}

#[test]
fn proxies_of_the_environment_are_used() {
    let home = temporary("proxy");
    let proxy = hub(|request| Answer::contents(&contents(), request.first()));
    let mut command = get(&[NAME, "--yes"], "http://hub.invalid", &home);
    command.env("HTTP_PROXY", proxy.address());
    succeeds(command);
    assert!(proxy.asked().iter().any(|request| request.line.contains("hub.invalid")), "{:?}", proxy.asked());
    std::fs::remove_dir_all(home.join("hub")).expect("a folder");
    let mut command = get(&[NAME, "--yes"], &proxy.address(), &home);
    command.env("HTTP_PROXY", "http://127.0.0.1:1").env("NO_PROXY", "127.0.0.1");
    succeeds(command);
    let _ = std::fs::remove_dir_all(home);
}

#[test]
fn the_file_goes_where_the_user_says() {
    let home = temporary("places");
    let hub = hub(|request| Answer::contents(&contents(), request.first()));
    let comfyui = home.join("ComfyUI");
    fails(get(&[NAME, "--yes", "--comfyui", text(&comfyui)], &hub.address(), &home), &["models/vae", "--comfyui"]);
    std::fs::create_dir_all(comfyui.join("models/vae")).expect("a folder");
    succeeds(get(&[NAME, "--yes", "--comfyui", text(&comfyui)], &hub.address(), &home));
    assert_eq!(names(&comfyui.join("models/vae")), ["ae.safetensors"]);
    let folder = format!("{}/", text(&home.join("models")));
    let said = succeeds(get(&[NAME, "--yes", "--to", &folder], &hub.address(), &home));
    assert!(said.contains(&format!("--weights {folder}ae.safetensors")), "{said}");
    let file = home.join("named.safetensors");
    succeeds(get(&[NAME, "--yes", "--to", text(&file)], &hub.address(), &home));
    assert_eq!(std::fs::read(&file).expect("the file"), contents());
    assert!(!home.join("hub").exists());
    // A file that is there is replaced with -y only.
    std::fs::write(&file, "mine").expect("a file");
    fails(get(&[NAME, "--yes", "--to", text(&file)], &hub.address(), &home), &["exists", "-y"]);
    succeeds(get(&[NAME, "--yes", "-y", "--to", text(&file)], &hub.address(), &home));
    assert_eq!(std::fs::read(&file).expect("the file"), contents());
    let _ = std::fs::remove_dir_all(home);
}

/// A part is kept, unlike unfinished outputs of other commands.
#[cfg(unix)]
#[test]
fn an_interrupted_download_keeps_its_part() {
    let home = temporary("interrupted");
    let blobs = home.join("hub").join(FOLDER).join("blobs");
    let hanging = hub(|_| Answer { hangs: true, ..Answer::contents(&contents(), None).cut(300_000) });
    let mut command = get(&[NAME, "--yes"], &hanging.address(), &home);
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts");
    let part = blobs.join(format!("{}.incomplete", sum()));
    let started = Instant::now();
    while std::fs::metadata(&part).map_or(0, |found| found.len()) < 300_000 {
        assert!(started.elapsed() < Duration::from_secs(20), "no part");
        std::thread::sleep(Duration::from_millis(5));
    }
    // A second run does not write to the same file.
    fails(get(&[NAME, "--yes"], &hanging.address(), &home), &["another process"]);
    let sent = Command::new("sh").args(["-c", &format!("kill -TERM {}", child.id())]).status().expect("sh");
    assert!(sent.success());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(143));
    assert!(error(&output).contains("goes on"), "{}", error(&output));
    let whole = hub(|request| Answer::contents(&contents(), request.first()));
    succeeds(get(&[NAME, "--yes"], &whole.address(), &home));
    assert_eq!(std::fs::read(cached(&home)).expect("the file"), contents());
    assert!(whole.asked().iter().any(|request| request.first() == Some(300_000)));
    let _ = std::fs::remove_dir_all(home);
}

#[test]
fn names_stand_for_checkpoints_everywhere() {
    let home = temporary("names");
    let run = |words: &[&str]| vvae(words).env("HF_HOME", &home).output().expect("it starts");
    let info = run(&["info", "demo"]);
    assert!(info.status.success() && String::from_utf8_lossy(&info.stdout).contains("seedvr2"));
    let check = run(&["check", "demo", "--shape", "1x16x16", "--device", "cpu"]);
    assert!(check.status.success(), "{}", error(&check));
    assert!(String::from_utf8_lossy(&check.stdout).starts_with("vvae check: demo.safetensors"));
    for words in
        [&["info", "seedvr2"][..], &["check", "seedvr2"], &["plan", "--decode", "1x64x64", "--weights", "seedvr2"]]
    {
        assert!(error(&run(words)).contains("vvae get seedvr2"), "{words:?}");
    }
    assert!(error(&run(&["info", "sedvr2"])).contains("no model's name; names are demo, seedvr2, "));
    // An empty variable is unset: the plan is for the published sizes.
    let plan = vvae(&["plan", "--decode", "1x64x64"]).env("VIDEO_VAE_WEIGHTS", "").output().expect("it starts");
    assert!(String::from_utf8_lossy(&plan.stdout).contains("published"), "{}", error(&plan));
    let encode = vvae(&["roundtrip", "a.y4m", "b.y4m"]).env("VIDEO_VAE_WEIGHTS", "").current_dir(root()).output();
    assert!(!encode.expect("it starts").status.success());
    let _ = std::fs::remove_dir_all(home);
}
