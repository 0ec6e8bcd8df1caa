"""Line-by-line display and parsing of what tasks print."""
