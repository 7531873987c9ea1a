//! The few statistics that the reports are made of.

/// The middle one, or the mean of the two in the middle; `None` of none.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    let upper = *sorted.get(half)?;
    match sorted.len() % 2 {
        1 => Some(upper),
        _ => Some(f64::midpoint(*sorted.get(half - 1)?, upper)),
    }
}

/// The least and the greatest; `None` of none.
pub fn range(values: &[f64]) -> Option<(f64, f64)> {
    let low = values.iter().copied().min_by(f64::total_cmp)?;
    let high = values.iter().copied().max_by(f64::total_cmp)?;
    Some((low, high))
}

/// Jain's index of fairness: 1 when all have the same, 1/n when one has everything. 0 when nobody has anything: that is not fair, it
/// is broken.
pub fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    match squares > 0.0 {
        true => sum * sum / (shares.len() as f64 * squares),
        false => 0.0,
    }
}

/// N/2, the half-power point: the message size at which half of the greatest throughput is reached, ParaStation2's measure (000,
/// Table 3). `curve` is (bytes, throughput) by rising bytes. Between two sizes it is interpolated as a straight line over the
/// logarithm of the size, as plotted. `None` when even the smallest size reaches half, or nothing was measured: the point is then
/// below the curve, and a number would be made up.
pub fn half_power_point(curve: &[(usize, f64)]) -> Option<f64> {
    let (_, peak) = range(&curve.iter().map(|(_, rate)| *rate).collect::<Vec<_>>())?;
    let half = peak / 2.0;
    let after = curve.iter().position(|(_, rate)| *rate >= half)?;
    let (bytes, rate) = *curve.get(after)?;
    let (bytes_before, rate_before) = *curve.get(after.checked_sub(1)?)?;
    let share = (half - rate_before) / (rate - rate_before);
    let (from, to) = ((bytes_before.max(1) as f64).ln(), (bytes as f64).ln());
    Some((from + share * (to - from)).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-9, "{found}, not {expected}");
    }

    #[test]
    fn the_median_of_an_even_number_is_between() {
        near(median(&[4.0, 1.0, 2.0, 100.0]).unwrap(), 3.0);
        near(median(&[9.0, 1.0, 2.0]).unwrap(), 2.0);
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn the_range_is_the_least_and_the_greatest() {
        assert_eq!(range(&[3.0, -1.0, 2.0]), Some((-1.0, 3.0)));
        assert_eq!(range(&[]), None);
    }

    #[test]
    fn fairness_is_one_when_all_have_the_same_and_one_nth_when_one_has_all() {
        near(jain(&[5.0, 5.0, 5.0, 5.0]), 1.0);
        near(jain(&[7.0, 0.0, 0.0, 0.0]), 0.25);
        // (1 + 2 + 3)² / (3 · (1 + 4 + 9))
        near(jain(&[1.0, 2.0, 3.0]), 36.0 / 42.0);
        near(jain(&[0.0, 0.0]), 0.0);
        near(jain(&[]), 0.0);
    }

    #[test]
    fn the_half_power_point_lies_on_the_plotted_line() {
        // Half of 100 lies halfway between 20 and 80, so halfway between the logarithms of 64 and 256.
        let curve = [(64, 20.0), (256, 80.0), (1024, 100.0)];
        near(half_power_point(&curve).unwrap(), 128.0);
        // A curve that falls again at the end: its peak counts.
        let curve = [(100, 30.0), (200, 60.0), (400, 120.0), (800, 90.0)];
        near(half_power_point(&curve).unwrap(), 200.0);
    }

    #[test]
    fn a_curve_that_begins_above_its_half_has_no_half_power_point() {
        assert_eq!(half_power_point(&[(64, 60.0), (128, 100.0)]), None);
        assert_eq!(half_power_point(&[]), None);
    }
}
