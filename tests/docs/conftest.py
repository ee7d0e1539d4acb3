"""The browser for the tests of the site."""

from __future__ import annotations

from support.browser import browser as browser
