//! The rates that plans are compared by: told in a plan's text, and taken back by the key `rates`.

use crate::common::{Vae, demo};
use video_vae::capi::*;

const LATENT: [i64; 5] = [1, 16, 9, 30, 40];

fn plan(vae: &Vae) -> (f64, String) {
    let (info, text) = vae.plan("decode", LATENT).unwrap();
    (info.seconds, text)
}

/// The last line of a plan, as the key takes it.
fn rates(text: &str) -> &str {
    text.lines().last().unwrap().strip_prefix("rates: ").unwrap()
}

#[test]
fn told_rates_give_the_same_plan() {
    let first = Vae::open(&demo()).unwrap();
    let (seconds, text) = plan(&first);
    assert!(seconds > 0.0);
    let second = Vae::open(&demo()).unwrap();
    second.configure("rates", "products=1e9").unwrap();
    assert_ne!(plan(&second), (seconds, text.clone()));
    second.configure("rates", rates(&text)).unwrap();
    assert_eq!(plan(&second), (seconds, text.clone()));
    first.configure("rates", rates(&text)).unwrap();
    assert_eq!(plan(&first), (seconds, text));
}

#[test]
fn given_rates_are_what_time_follows_from() {
    let vae = Vae::open(&demo()).unwrap();
    let seconds = |given: &str| {
        vae.configure("rates", given).unwrap();
        plan(&vae)
    };
    let (once, text) = seconds("products=1e12,memory=1e11,copies=1e10");
    assert_eq!(rates(&text), "products=1e12,memory=1e11,copies=1e10");
    let (twice, _) = seconds("copies=2e10,memory=2e11,products=2e12");
    assert!((once / twice - 2.0).abs() < 1e-9, "{once} and {twice}");
    // Digits that are not round come back bit for bit.
    let odd = "products=3.333333333333333e13,memory=1.2345678901234567e11,copies=9.87654321e9";
    assert_eq!(rates(&seconds(odd).1), odd);
    // Those that are not given are the device's, also after others were given.
    let own = seconds("auto").1;
    let some = seconds("memory=5e9").1;
    let parts = |text: &str| rates(text).split(',').map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(parts(&some), [&parts(&own)[0], "memory=5e9", &parts(&own)[2]]);
    assert_eq!(seconds("auto").1, own);
}

#[test]
fn wrong_rates_are_refused_by_name() {
    let vae = Vae::open(&demo()).unwrap();
    let before = plan(&vae);
    for (value, part) in [
        ("", "\"\""),
        ("fast", "\"fast\""),
        ("products=1e12,speed=3", "\"speed=3\""),
        ("products=1e12,products=1e12", "\"products=1e12\""),
        ("memory=0,products=1e12", "\"memory=0\""),
        ("copies=nan", "\"copies=nan\""),
        ("copies=1e400", "\"copies=1e400\""),
    ] {
        vae.configure("rates", value).unwrap_err().says(VVAE_ERROR_ARGUMENT, &["rates", part, "such as products="]);
    }
    assert_eq!(plan(&vae), before);
}
