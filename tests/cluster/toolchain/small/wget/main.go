// Command wget prints what a URL answers, with the few flags of the real one that the tests use.
// A static busybox's own ends with a segmentation fault when it looks up a name without libc's modules.
package main

import (
	"crypto/tls"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"
)

func main() {
	flag.Bool("q", false, "be quiet, which it always is")
	output := flag.String("O", "-", "where the answer goes; only - is known")
	seconds := flag.Int("T", 30, "timeout in seconds")
	header := flag.String("header", "", "one more header, NAME: VALUE")
	insecure := flag.Bool("no-check-certificate", false, "trust any server")
	flag.Parse()
	if flag.NArg() != 1 || *output != "-" {
		fail("usage: wget -q [-T SECONDS] [--header H] [--no-check-certificate] -O - URL")
	}
	request, err := http.NewRequest(http.MethodGet, flag.Arg(0), nil)
	if err != nil {
		fail(err.Error())
	}
	if name, value, found := strings.Cut(*header, ":"); found {
		request.Header.Set(name, strings.TrimSpace(value))
	}
	client := http.Client{
		Timeout:   time.Duration(*seconds) * time.Second,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: *insecure}},
	}
	answer, err := client.Do(request)
	if err != nil {
		fail(err.Error())
	}
	if answer.StatusCode >= 400 {
		fail("server returned error: HTTP/1.1 " + answer.Status)
	}
	if _, err := io.Copy(os.Stdout, answer.Body); err != nil {
		fail(err.Error())
	}
}

func fail(message string) {
	fmt.Fprintln(os.Stderr, "wget: "+message)
	os.Exit(1)
}
