//! Quantiles of a histogram that has grown between two reports.

use serde_json::{Value, json};

/// The quantiles `top` shows.
const QUANTILES: [(&str, f64); 3] = [("p50", 0.5), ("p99", 0.99), ("p999", 0.999)];

fn numbers(histogram: &Value, key: &str) -> Vec<u64> {
    let list = histogram[key].as_array().into_iter().flatten();
    list.filter_map(Value::as_u64).collect()
}

/// Nanoseconds by quantile; each null if nothing was counted in between.
pub fn quantiles(before: &Value, now: &Value) -> Value {
    let (was, is) = (numbers(before, "counts"), numbers(now, "counts"));
    let grown: Vec<u64> = (is.iter().zip(&was))
        .map(|(is, was)| is.saturating_sub(*was))
        .collect();
    let bounds = numbers(now, "bounds_ns");
    let found = QUANTILES.map(|(name, q)| (name.to_owned(), json!(quantile(&bounds, &grown, q))));
    Value::Object(found.into_iter().collect())
}

/// As if times were spread evenly over their class, as Prometheus has it; of the last class only its beginning is known.
fn quantile(bounds: &[u64], counts: &[u64], q: f64) -> Option<u64> {
    let all = counts.iter().fold(0_u64, |sum, n| sum.saturating_add(*n));
    if all == 0 {
        return None;
    }
    let mut left = q * all as f64;
    let mut from = 0;
    for (count, to) in counts.iter().zip(bounds) {
        if *count > 0 && left <= *count as f64 {
            let share = left / *count as f64;
            return Some(from + (to.saturating_sub(from) as f64 * share) as u64);
        }
        left -= *count as f64;
        from = *to;
    }
    Some(from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn histogram(counts: &[u64]) -> Value {
        json!({ "bounds_ns": [1000, 2000, 4000], "counts": counts })
    }

    #[test]
    fn only_what_was_added_counts() {
        let found = quantiles(&histogram(&[100, 0, 0, 7]), &histogram(&[100, 10, 0, 7]));
        assert_eq!(found, json!({ "p50": 1500, "p99": 1990, "p999": 1999 }));
        let beyond = quantiles(&histogram(&[0, 0, 0, 0]), &histogram(&[0, 0, 0, 1]));
        assert_eq!(beyond["p50"], 4000);
    }

    // Nothing counted, counts that began anew, reports that make no sense. Expect: unknown, no panic.
    #[test]
    fn nothing_is_nothing() {
        let some = histogram(&[1, 2, 3, 4]);
        for (before, now) in [
            (&some, &some),
            (&some, &histogram(&[0, 0, 0, 0])),
            (&json!(3), &some),
            (&some, &json!({ "counts": "x" })),
            (&some, &json!({ "bounds_ns": [], "counts": [] })),
        ] {
            assert_eq!(quantiles(before, now)["p99"], Value::Null, "{before} {now}");
        }
    }
}
