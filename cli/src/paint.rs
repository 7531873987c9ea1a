//! Colours: on a terminal, unless `NO_COLOR` is set or the terminal is a dumb one.

use std::io::IsTerminal;

/// How a word is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// As it comes.
    Plain,
    /// A heading.
    Heading,
    /// In order.
    Good,
    /// On its way, or to be looked at.
    Fair,
    /// Out of order.
    Bad,
}

/// Whether there are colours.
#[derive(Clone, Copy, Debug)]
pub struct Paint(bool);

impl Paint {
    /// None.
    pub const NONE: Self = Self(false);

    /// As standard output can have it.
    pub fn for_stdout() -> Self {
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        Self(std::io::stdout().is_terminal() && !set("NO_COLOR") && !dumb)
    }

    /// The text in its style.
    pub fn paint(self, style: Style, text: &str) -> String {
        let code = match style {
            _ if !self.0 => return text.to_owned(),
            Style::Plain => return text.to_owned(),
            Style::Heading => "1",
            Style::Good => "32",
            Style::Fair => "33",
            Style::Bad => "31",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// How a cell under this heading is shown.
pub fn style_of(heading: &str, cell: &str) -> Style {
    if !["state", "standby", "severity", "interface_state"].contains(&heading.trim()) {
        return Style::Plain;
    }
    match cell {
        "up" | "running" | "ready" | "open" => Style::Good,
        "down" | "gone" | "stripped" | "degraded" | "incompatible" | "unresolved" | "stopped"
        | "error" => Style::Bad,
        "idle" | "info" | "-" => Style::Plain,
        _ => Style::Fair,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_around_the_word_or_nowhere() {
        assert_eq!(Paint(true).paint(Style::Bad, "down"), "\x1b[31mdown\x1b[0m");
        assert_eq!(Paint(true).paint(Style::Plain, "x"), "x");
        assert_eq!(Paint::NONE.paint(Style::Bad, "down"), "down");
        assert_eq!(style_of("state", "up"), Style::Good);
        assert_eq!(style_of("  interface_state", "stripped"), Style::Bad);
        assert_eq!(style_of("standby", "preparing"), Style::Fair);
        assert_eq!(style_of("name", "up"), Style::Plain);
    }
}
