//! How HDR video was mastered: colours and light of the display, and the brightest pixel and frame. Kept as x265 writes
//! it.

use serde_json::Value;

/// Of the chromaticities, and of the luminances, in a text.
const COLOUR_UNITS: f64 = 50_000.0;
const LIGHT_UNITS: f64 = 10_000.0;
/// The order in a text: green, blue, red and white as x and y, the most and the least light.
const FIELDS: [&str; 10] = [
    "green_x",
    "green_y",
    "blue_x",
    "blue_y",
    "red_x",
    "red_y",
    "white_point_x",
    "white_point_y",
    "max_luminance",
    "min_luminance",
];

fn units(field: usize) -> f64 {
    if field < 8 { COLOUR_UNITS } else { LIGHT_UNITS }
}

/// "G(13250,34500)B(7500,3000)R(34000,16000)WP(15635,16450)L(10000000,50)" from ffprobe's side data.
pub fn mastering(side_data: &Value) -> Option<String> {
    let number = |field: usize| {
        let (above, below) = side_data[FIELDS[field]].as_str()?.split_once('/')?;
        let value = above.parse::<f64>().ok()? / below.parse::<f64>().ok()?;
        value.is_finite().then(|| (value * units(field)).round().to_string())
    };
    let numbers = (0..FIELDS.len()).map(number).collect::<Option<Vec<_>>>()?;
    written(&numbers.join(","))
}

/// A text with these ten numbers and nothing else. It may come from a file, and goes to an encoder.
pub fn written(text: &str) -> Option<String> {
    let [gx, gy, bx, by, rx, ry, wx, wy, most, least] = numbers::<10>(text)?;
    Some(format!("G({gx},{gy})B({bx},{by})R({rx},{ry})WP({wx},{wy})L({most},{least})"))
}

/// "1000,400"
pub fn light(side_data: &Value) -> Option<String> {
    let [most, mean] = ["max_content", "max_average"].map(|key| side_data[key].as_u64());
    Some(format!("{},{}", most?, mean?))
}

/// The numbers of a text, if it has so many.
fn numbers<const N: usize>(text: &str) -> Option<[u64; N]> {
    let digits = text.split(|c: char| !c.is_ascii_digit()).filter(|part| !part.is_empty());
    let numbers: Option<Vec<u64>> = digits.map(|part| part.parse().ok()).collect();
    numbers?.try_into().ok()
}

/// The ten fields in their own units: chromaticities from 0 to 1, luminances in candela a square metre.
pub fn display(text: &str) -> Option<[f64; 10]> {
    let numbers = numbers::<10>(text)?;
    Some(std::array::from_fn(|field| numbers[field] as f64 / units(field)))
}

/// The brightest pixel and the brightest frame, in candela a square metre.
pub fn brightest(text: &str) -> Option<[u64; 2]> {
    numbers(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_has_the_numbers_of_the_file() {
        let told = serde_json::json!({
            "red_x": "34000/50000", "red_y": "16000/50000", "green_x": "13250/50000", "green_y": "34500/50000",
            "blue_x": "7500/50000", "blue_y": "3000/50000", "white_point_x": "15635/50000",
            "white_point_y": "16450/50000", "min_luminance": "50/10000", "max_luminance": "10000000/10000",
        });
        let text = mastering(&told).unwrap();
        assert_eq!(text, "G(13250,34500)B(7500,3000)R(34000,16000)WP(15635,16450)L(10000000,50)");
        assert_eq!(written(&text.replace('L', ":output=x:L")), Some(text.clone()));
        assert_eq!(display(&text).unwrap(), [0.265, 0.69, 0.15, 0.06, 0.68, 0.32, 0.3127, 0.329, 1000.0, 0.005]);
        assert_eq!(
            brightest(&light(&serde_json::json!({ "max_content": 1000, "max_average": 400 })).unwrap()),
            Some([1000, 400])
        );
        assert!(mastering(&serde_json::json!({ "red_x": "1/0" })).is_none() && display("1,2").is_none());
    }
}
