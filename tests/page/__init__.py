"""The live page in a real browser, before a router's front that plays any state."""
