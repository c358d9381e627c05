// A fake NVRTC: a program is compiled for the CPU with emu.h, and its "machine code" is the shared object, which
// driver.cc loads. The signatures are those of nvrtc.h 13.0.
#include <fstream>
#include <regex>
#include <sstream>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <sys/stat.h>
#include <unistd.h>

namespace {

enum Status { SUCCESS = 0, OUT_OF_MEMORY = 1, INVALID_INPUT = 3, INVALID_OPTION = 5, COMPILATION = 6 };
struct Program { std::string text, cubin, log; };
const int ARCHS[] = {80, 86, 89, 90, 100, 103, 120};

std::string read(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
}

// Returns the start function of each kernel of the text.
std::string footer(const std::string& text) {
    static const std::regex kernel(R"re(extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\()re");
    std::string made = "\n#line 1 \"footer\"\n";
    for (std::sregex_iterator at(text.begin(), text.end(), kernel), end; at != end; ++at) {
        made += "LL_EMU_KERNEL(" + (*at)[1].str() + ")\n";
    }
    return made;
}

}  // namespace

extern "C" {

// A version that does not exist: the disk cache is keyed by it, and this code must never be used on a GPU.
int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 99, SUCCESS; }
int nvrtcGetNumSupportedArchs(int* n) { return *n = sizeof ARCHS / sizeof *ARCHS, SUCCESS; }
int nvrtcGetSupportedArchs(int* archs) { return memcpy(archs, ARCHS, sizeof ARCHS), SUCCESS; }
const char* nvrtcGetErrorString(int status) {
    return status == COMPILATION      ? "NVRTC_ERROR_COMPILATION"
           : status == INVALID_OPTION ? "NVRTC_ERROR_INVALID_OPTION"
                                      : "NVRTC_ERROR_OTHER";
}
int nvrtcCreateProgram(Program** program, const char* text, const char* name, int n_headers, const char* const*,
                       const char* const*) {
    *program = new Program{text, "", ""};
    return n_headers ? INVALID_INPUT : SUCCESS;
}
int nvrtcDestroyProgram(Program** program) { return delete *program, *program = nullptr, SUCCESS; }

int nvrtcCompileProgram(Program* program, int n_options, const char* const* options) {
    static const std::regex known(R"(--std=c\+\+17|-default-device|--ptxas-options=-v|--gpu-architecture=sm_\d+)");
    static const std::regex define(R"(-D\w+=\w+)");
    std::string defines;
    for (int i = 0; i < n_options; i++) {
        if (std::regex_match(options[i], define)) {
            defines += std::string(" ") + options[i];
        } else if (!std::regex_match(options[i], known)) {
            program->log = std::string("unknown option ") + options[i];
            return INVALID_OPTION;
        }
    }
    char folder[] = "/tmp/fake-nvrtc-XXXXXX";
    if (!mkdtemp(folder)) return OUT_OF_MEMORY;
    std::string stem = std::string(folder) + "/module";
    std::ofstream(stem + ".cc") << program->text << footer(program->text);
    std::string command = "c++ @" EMULATOR "/flags.txt -include " EMULATOR "/emu.h" + defines + " " + stem + ".cc -o " +
                          stem + ".so 2>" + stem + ".log";
    bool is_made = system(command.c_str()) == 0;
    program->log = read(stem + ".log");
    program->cubin = is_made ? read(stem + ".so") : "";
    for (const char* end : {".cc", ".so", ".log"}) unlink((stem + end).c_str());
    rmdir(folder);
    return is_made ? SUCCESS : COMPILATION;
}

int nvrtcGetCUBINSize(Program* program, size_t* n) { return *n = program->cubin.size(), SUCCESS; }
int nvrtcGetCUBIN(Program* program, char* to) {
    return memcpy(to, program->cubin.data(), program->cubin.size()), SUCCESS;
}
int nvrtcGetProgramLogSize(Program* program, size_t* n) { return *n = program->log.size() + 1, SUCCESS; }
int nvrtcGetProgramLog(Program* program, char* to) {
    return memcpy(to, program->log.c_str(), program->log.size() + 1), SUCCESS;
}

}  // extern "C"
