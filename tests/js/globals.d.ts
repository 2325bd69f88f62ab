// What the scripts add to or expect of the browser's global object, for `tsc`.
interface Window {
  uPlot: any;
  footplate: any;
}
