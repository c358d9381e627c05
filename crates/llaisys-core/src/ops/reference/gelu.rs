//! Reference for `gelu` and for the gate of the same name.

/// `y[i] = x[i] / 2 (1 + erf(x[i] / sqrt(2)))`, in f64.
pub fn gelu(x: &[f32]) -> Vec<f64> {
    x.iter()
        .map(|&x| f64::from(x))
        .map(|x| x / 2.0 * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)))
        .collect()
}

/// `erf(z) = 2 / sqrt(pi) e^(-z^2) sum_n 2^n z^(2n+1) / (1 * 3 * ... * (2n+1))`, whose terms have one sign.
fn erf(z: f64) -> f64 {
    if z.abs() > 6.0 {
        return z.signum();
    }
    let (mut term, mut sum, mut n) = (z, z, 0.0);
    while term.abs() > 1e-18 * sum.abs() {
        n += 1.0;
        term *= 2.0 * z * z / (2.0 * n + 1.0);
        sum += term;
    }
    2.0 / std::f64::consts::PI.sqrt() * (-z * z).exp() * sum
}
