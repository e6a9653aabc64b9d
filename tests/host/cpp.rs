//! The C++ hosts of host-examples/cpp: built as a user builds them, run, and compared with the C ABI.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use crate::common::process::least_time;
use crate::common::tools::{has, said, succeeds};
use crate::common::{Buffer, Random, Vae, demo, golden, library_path, root, safetensors, small};
use video_vae::capi::*;

/// One test at a time: they share the build folder, and one measures time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn cpp() -> PathBuf {
    root().join("host-examples/cpp")
}

/// An empty folder for one test.
fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("host_cpp").join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// The folder of the built hosts. It persists between runs, so that builds are incremental.
fn built() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        if !has("cmake") || !has("c++") {
            return None;
        }
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("host_cpp_build");
        let mut configure = Command::new("cmake");
        configure.arg("-S").arg(cpp()).arg("-B").arg(&folder);
        configure.arg(format!("-DVIDEO_VAE_LIBRARY={}", library_path().display()));
        // Without optimisation, which compiles faster: the library does the work.
        succeeds(configure.args(["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS=-Werror"]));
        succeeds(Command::new("cmake").arg("--build").arg(&folder).args(["-j", "2", "--target", "all", "golden"]));
        Some(folder)
    };
    BUILT.get_or_init(build).as_deref()
}

fn graph_host(build: &Path) -> Command {
    Command::new(build.join("graph_host"))
}

/// A graph of frames in, encode, decode, frames out.
fn graph(input: &str, encode: &str, output: &Path) -> String {
    format!(
        r#"{{
            "checkpoint": "{}",
            "device": "cpu",
            "nodes": [
                {{ "id": "out", "type": "frames_out", "params": {{ "path": "{}" }} }},
                {{ "id": "clip", "type": "frames_in", "params": {{ {input} }} }},
                {{ "id": "enc", "type": "encode", "params": {{ {encode} }} }},
                {{ "id": "dec", "type": "decode" }}
            ],
            "links": [["dec.video", "out.video"], ["clip.video", "enc.video"], ["enc.latent", "dec.latent"]]
        }}"#,
        small().display(),
        output.display()
    )
}

fn random_frames(frames: i64, height: i64, width: i64) -> Buffer {
    let mut clip = Buffer::interleaved(VVAE_DTYPE_U8, [1, 3, frames, height, width]);
    let mut random = Random(5);
    clip.bytes_mut().iter_mut().for_each(|byte| *byte = random.below(256) as u8);
    clip
}

/// The graph's result, by the C ABI.
fn expected(clip: &Buffer, settings: &[(&str, &str)]) -> Vec<u8> {
    let vae = Vae::open(&small()).unwrap();
    let [_, _, t, h, w] = clip.shape;
    let mut latent = Buffer::new(VVAE_DTYPE_F32, [1, 16, 1 + (t + 2) / 4, (h + 7) / 8, (w + 7) / 8]);
    for (key, value) in settings {
        vae.configure(key, value).unwrap();
    }
    vae.encode(clip, &mut latent).unwrap();
    for (key, _) in settings {
        vae.configure(key, "1.0").unwrap();
    }
    let mut back = Buffer::interleaved(VVAE_DTYPE_U8, clip.shape);
    vae.decode(&latent, &mut back).unwrap();
    back.bytes().to_vec()
}

#[test]
fn graph_matches_the_c_abi() {
    let _alone = alone();
    let Some(build) = built() else { return };
    let folder = scratch("graph");
    // Seven frames of 20 x 36: padded in every direction on the way in, cropped on the way out.
    let (clip, header) = (random_frames(7, 20, 36), "P6\n# a comment\n36 20\n255\n");
    let frame = 20 * 36 * 3;
    fs::create_dir_all(folder.join("in é")).unwrap();
    for (t, pixels) in clip.bytes().chunks(frame).enumerate() {
        fs::write(folder.join(format!("in é/{t}.ppm")), [header.as_bytes(), pixels].concat()).unwrap();
    }
    fs::write(folder.join("clip.rgb"), clip.bytes()).unwrap();

    // From folder to folder. Paths are relative to the graph and not ASCII.
    fs::write(folder.join("ppm.json"), graph(r#""path": "in \u00e9""#, "", Path::new("out é"))).unwrap();
    let text = succeeds(graph_host(build).arg(folder.join("ppm.json")));
    for words in ["plan of enc: encode [1, 3, 7, 20, 36]", "plan of dec: decode [1, 16, 3, 3, 5]", "enc: encode 100%"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let right = expected(&clip, &[]);
    for (t, pixels) in right.chunks(frame).enumerate() {
        let file = fs::read(folder.join(format!("out é/frame_{t:06}.ppm"))).unwrap();
        assert!(file.ends_with(pixels) && file.len() == pixels.len() + "P6\n36 20\n255\n".len(), "frame {t}");
    }

    // Raw bytes, and a parameter of one node: enc's setting must not affect dec.
    let input = r#""path": "clip.rgb", "width": 36, "height": 20"#;
    fs::write(folder.join("raw.json"), graph(input, r#""scaling_factor": 0.5"#, Path::new("out.rgb"))).unwrap();
    succeeds(graph_host(build).arg(folder.join("raw.json")));
    let scaled = expected(&clip, &[("scaling_factor", "0.5")]);
    assert!(scaled != right && fs::read(folder.join("out.rgb")).unwrap() == scaled);
}

/// Pictures with alpha, as PAM files and as raw bytes, through a model that has four channels of pixels.
#[test]
fn graph_host_takes_the_channels_of_the_model() {
    let _alone = alone();
    let Some(build) = built() else { return };
    let folder = scratch("alpha");
    let weights = golden("families/qwen21.safetensors");
    let mut picture = Buffer::interleaved(VVAE_DTYPE_U8, [1, 4, 1, 32, 48]);
    let mut random = Random(6);
    picture.bytes_mut().iter_mut().for_each(|byte| *byte = random.below(256) as u8);
    let header = "P7\nWIDTH 48\nHEIGHT 32\nDEPTH 4\nMAXVAL 255\nTUPLTYPE RGB_ALPHA\nENDHDR\n";
    fs::write(folder.join("in.pam"), [header.as_bytes(), picture.bytes()].concat()).unwrap();
    fs::write(folder.join("in.rgb"), picture.bytes()).unwrap();
    let vae = Vae::open(&weights).unwrap();
    let (mut latent, mut back) =
        (Buffer::poisoned([1, 64, 1, 2, 3]), Buffer::interleaved(VVAE_DTYPE_U8, picture.shape));
    vae.encode(&picture, &mut latent).unwrap();
    vae.decode(&latent, &mut back).unwrap();
    let run = |input: &str, output: &str| {
        let text = graph(input, "", Path::new(output));
        let text = text.replace(small().to_str().unwrap(), weights.to_str().unwrap());
        fs::write(folder.join("graph.json"), text).unwrap();
        graph_host(build).arg(folder.join("graph.json")).output().unwrap()
    };
    let told = said(&run(r#""path": "in.pam""#, "out"));
    assert!(told.contains("qwen21, 4 channels of pixels"), "{told}");
    assert!(
        fs::read(folder.join("out/frame_000000.pam")).unwrap() == [header.as_bytes(), back.bytes()].concat(),
        "{told}"
    );
    run(r#""path": "in.rgb", "width": 48, "height": 32"#, "out.rgb");
    assert!(fs::read(folder.join("out.rgb")).unwrap() == back.bytes());
    let refused = said(&run(r#""path": "in.pam""#, "out.ppm"));
    assert!(refused.contains("out.ppm") && refused.contains("name it .pam"), "{refused}");
}

#[test]
fn graph_host_lists_nodes_and_devices() {
    let _alone = alone();
    let Some(build) = built() else { return };
    let text = succeeds(graph_host(build).arg("nodes"));
    for words in ["node    encode: ", "node    decode: ", "in    video: video, u8 | u16", "device  cpu "] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(!text.contains("e+"), "{text}");
    for words in ["param memory_limit = auto (bytes, such as 8GiB", "param posterior = mean (one of mean | sample)"] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

/// Those of host-examples/cpp/README.md, with the demo's checkpoint.
#[test]
fn readme_programs_run() {
    let _alone = alone();
    let Some(build) = built() else { return };
    let graph = cpp().join("graphs/roundtrip.json");
    let text = succeeds(graph_host(build).arg(&graph));
    assert!(text.contains("plan of decode") && root().join("target/graph_host").is_dir(), "{text}");
    let text = succeeds(Command::new(build.join("roundtrip")).arg(demo()));
    let quality = text.split(" dB between").next().unwrap().rsplit('\n').next().unwrap().parse::<f64>().unwrap();
    assert!(quality > 25.0, "{text}");
}

#[test]
fn a_bad_graph_is_told_what_is_wrong() {
    let _alone = alone();
    let Some(build) = built() else { return };
    let folder = scratch("bad");
    let good = graph(r#""path": "clip.rgb", "width": 16, "height": 16"#, "", &folder.join("out"));
    fs::write(folder.join("clip.rgb"), [9; 16 * 16 * 3]).unwrap();
    let cases = [
        ("\"type\": \"encode\"", "\"type\": \"encoder\"", "line 7: no node type \"encoder\"; there is frames_in"),
        ("enc.latent", "enc.video", "has no output \"video\"; it has latent, logvar"),
        ("[\"enc.latent\", ", "[\"clip.video\", ", "\"clip.video\" is video, \"dec.latent\" takes latent"),
        ("[\"clip.video\", \"enc.video\"], ", "", "nothing is linked to \"enc.video\", which needs video"),
        ("[\"clip.video\", ", "[\"dec.video\", ", "the links go round in a circle"),
        ("enc.latent", "end.latent", "no node \"end\"; there is out, clip, enc, dec"),
        ("\"width\": 16", "\"width\": 17", "no whole number of frames of 17 x 16 x 3"),
        ("\"width\": 16", "\"with\": 16", "has no parameter \"with\"; it has path, width, height"),
        ("clip.rgb", "none.rgb", "none.rgb is not there"),
        ("\"params\": {  }", "\"params\": { \"seed\": -1 }", "node \"enc\": seed: \"-1\""),
        ("\"params\": {  }", "\"params\": { \"seed\": 1", "line 8: expected a name in quotes"),
        ("small.safetensors", "none.safetensors", "none.safetensors"),
        ("\"device\": \"cpu\"", "\"device\": \"cuda:77\"", "cuda:77"),
    ];
    for (from, to, words) in cases {
        assert!(good.contains(from), "{from}");
        fs::write(folder.join("bad.json"), good.replace(from, to)).unwrap();
        let output = graph_host(build).arg(folder.join("bad.json")).output().unwrap();
        let text = said(&output);
        assert!(output.status.code() == Some(1) && text.contains(words), "{to}: {text}");
        assert!(!folder.join("out").exists(), "{to}");
    }
}

#[test]
fn foreign_libraries_are_refused() {
    let _alone = alone();
    let Some(build) = built() else { return };
    let folder = scratch("library");
    let stubs = [
        ("other.so", "extern \"C\" unsigned vvae_abi_version() { return 7 << 16; }", "speaks ABI 7, this host ABI 2"),
        ("older.so", "extern \"C\" unsigned vvae_abi_version() { return 2 << 16; }", "lacks functions"),
        ("none.so", "", "is no video-vae library"),
    ];
    for (name, source, words) in stubs {
        fs::write(folder.join("stub.cpp"), source).unwrap();
        let mut compile = Command::new("c++");
        compile.args(["-shared", "-fPIC"]).arg(folder.join("stub.cpp")).arg("-o").arg(folder.join(name));
        succeeds(&mut compile);
        let output = graph_host(build).arg("--library").arg(folder.join(name)).arg("nodes").output().unwrap();
        assert!(output.status.code() == Some(1) && said(&output).contains(words), "{}", said(&output));
    }
    let output = graph_host(build).args(["--library", "/no/such.so", "nodes"]).output().unwrap();
    assert!(said(&output).contains("cannot open the library: /no/such.so"), "{}", said(&output));
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_a_large_job_within_a_second() {
    let _alone = alone();
    let Some(build) = built() else { return };
    let folder = scratch("interrupt");
    fs::write(folder.join("clip.rgb"), vec![90; 5 * 1080 * 1920 * 3]).unwrap();
    let input = r#""path": "clip.rgb", "width": 1920, "height": 1080"#;
    // Two threads, so that it takes seconds on any machine.
    fs::write(folder.join("graph.json"), graph(input, r#""threads": 2"#, Path::new("out"))).unwrap();
    let took = least_time(Duration::from_secs(1), || time_to_stop(build, &folder));
    assert!(took < Duration::from_secs(1), "it took {took:?}");
    fs::remove_file(folder.join("clip.rgb")).unwrap();
}

/// Interrupts the graph in `folder`, and returns the time to its end.
#[cfg(unix)]
fn time_to_stop(build: &Path, folder: &Path) -> Duration {
    let mut host = graph_host(build);
    let mut host = host.arg(folder.join("graph.json")).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(host.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().starts_with("enc: encode")), "it started");
    std::thread::sleep(Duration::from_millis(300));
    let start = Instant::now();
    succeeds(Command::new("kill").args(["-INT", &host.id().to_string()]));
    let status = host.wait().unwrap();
    let took = start.elapsed();
    println!("stopped after {took:?}");
    let rest: Vec<String> = lines.map(|line| line.unwrap()).collect();
    assert_eq!(status.code(), Some(130), "{rest:?}");
    assert!(rest.iter().any(|line| line == "graph_host: interrupted"), "{rest:?}");
    assert!(!folder.join("out").exists());
    took
}

fn floats(path: &Path) -> Vec<f32> {
    let bytes = fs::read(path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

#[track_caller]
fn assert_close(what: &str, found: &[f32], right: &[f32]) {
    assert_eq!(found.len(), right.len(), "{what}");
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let difference = squares(&mut found.iter().zip(right).map(|(f, r)| f64::from(*f) - f64::from(*r)));
    let error = (difference / squares(&mut right.iter().map(|r| f64::from(*r)))).sqrt();
    assert!(error <= 1e-5, "{what}: relative error {error:.2e}");
}

#[test]
fn wrapper_matches_the_golden_clip() {
    let _alone = alone();
    let Some(build) = built() else { return };
    let folder = scratch("golden");
    let tensors = safetensors::read(&golden("small-clip5.safetensors"));
    for (name, file) in [("encode_video", "video.f32"), ("decode_latent", "latent.f32")] {
        let bytes: Vec<u8> = tensors[name].values.iter().flat_map(|value| value.to_le_bytes()).collect();
        fs::write(folder.join(file), bytes).unwrap();
    }
    succeeds(Command::new(build.join("golden")).arg(small()).arg(&folder).args(["5", "32", "48"]));
    for (name, file) in [("encode_mean", "mean"), ("encode_logvar", "logvar"), ("decode_video", "decoded")] {
        assert_close(file, &floats(&folder.join(file).with_extension("f32")), &tensors[name].values);
    }
    let bytes = |file: &str| fs::read(folder.join(file)).unwrap();
    assert!(bytes("streamed.f32") == bytes("decoded.f32"), "streaming changes no bit");

    let text = succeeds(Command::new(build.join("roundtrip")).arg(small()));
    assert!(text.contains("untiled: exact") && text.contains("dB between"), "{text}");
    assert!(text.contains("seedvr2: 3 pixel channels") && text.contains("(z - 0) * 0.9152"), "{text}");
    let wan = Command::new(build.join("roundtrip")).arg(golden("families/wan21.safetensors")).output().unwrap();
    assert!(said(&wan).contains("wan21: 3 pixel channels"), "{}", said(&wan));
    assert!(said(&wan).contains("first -0.7571 and 2.8184"), "{}", said(&wan));
    let output = Command::new(build.join("roundtrip")).arg("/no/such/file").output().unwrap();
    assert!(output.status.code() == Some(1) && said(&output).contains("status -3"), "{}", said(&output));
}

#[test]
fn installed_library_is_found_by_other_projects() {
    let _alone = alone();
    if !has("cmake") || !has("c++") {
        return;
    }
    let folder = scratch("install");
    succeeds(Command::new(cpp().join("install.sh")).arg(folder.join("first")).arg(library_path()));
    // The prefix must be relocatable.
    let prefix = folder.join("prefix");
    fs::rename(folder.join("first"), &prefix).unwrap();
    for file in ["include/video_vae.h", "include/video_vae.hpp", "lib/cmake/video_vae/video_vae-config.cmake"] {
        assert!(prefix.join(file).exists(), "{file}");
    }
    let source = cpp().join("tests/consumer");
    let mut configure = Command::new("cmake");
    configure.arg("-S").arg(&source).arg("-B").arg(folder.join("build"));
    succeeds(configure.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display())));
    succeeds(Command::new("cmake").arg("--build").arg(folder.join("build")));
    let text = succeeds(&mut Command::new(folder.join("build/consumer")));
    assert!(text.contains(concat!("video-vae ", env!("CARGO_PKG_VERSION"), " with")), "{text}");

    if !has("pkg-config") {
        return;
    }
    let mut ask = Command::new("pkg-config");
    ask.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig")).args(["--cflags", "--libs", "video_vae"]);
    let flags = succeeds(&mut ask);
    let mut compile = Command::new("c++");
    compile.args(["-std=c++17", "-o"]).arg(folder.join("by_pkg_config")).arg(source.join("main.cpp"));
    succeeds(compile.args(flags.split_whitespace()));
    succeeds(Command::new(folder.join("by_pkg_config")).env("LD_LIBRARY_PATH", prefix.join("lib")));
}
